"""Settings of all tests."""

from hypothesis import settings

# The same examples in every run: what fails here fails for everybody.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
