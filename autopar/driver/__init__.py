"""What joins the verbs: from a request to a plan, and from a plan to a program of this process."""
