"""`python -m tests.faults > docs/faults.md`"""

from tests.faults.listing import page

print(page(), end="")
