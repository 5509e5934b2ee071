"""Hosts in network namespaces, with links of any rate."""
