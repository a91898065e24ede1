"""The conformance kit (see the issue of that name); not yet part of this release."""
