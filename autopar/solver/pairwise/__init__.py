"""Problems of nodes and edges as arrays: made smaller, bounded and searched by compiled loops."""
