"""The conformance kit: whether a training job can trust a backend, sentence by sentence.

Without code::

    pytest --pyargs rdzv.conformance --rdzv-backend NAME --rdzv-endpoint URL

With code: subclass the suites of :mod:`rdzv.conformance.suites`, each with a fixture ``target``.
See docs/writing-a-backend.md. This module imports nothing, since the pytest plug-in beside it is
imported in every run of pytest in an environment that has rdzv.
"""
