"""Hosts in network namespaces, with links as slow as one likes."""
