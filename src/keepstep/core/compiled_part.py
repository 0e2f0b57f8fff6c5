"""The error of an installation without keepstep's compiled modules."""


def not_loaded(error: ImportError) -> ImportError:
    """The error to raise when a compiled module cannot be imported (``error``): one line that says what to do."""
    return ImportError(
        f"keepstep's compiled part cannot be loaded ({error}): install keepstep again with `pip install`, "
        "where there is a C++ compiler",
        name=error.name,
        path=error.path,
    )
