"""For all tests: none is judged by how long it takes."""

from hypothesis import settings

settings.register_profile("keepstep", deadline=None)
settings.load_profile("keepstep")
