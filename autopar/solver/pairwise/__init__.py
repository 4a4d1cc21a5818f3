"""Problems of nodes and edges as arrays: contracted, bounded and searched by compiled loops."""
