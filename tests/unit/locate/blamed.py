"""What a locator's culprits have to say."""

from __future__ import annotations

from keepstep.core.incident import Culprit, Link


def link_of(culprit: Culprit) -> Link:
    """The link that it is; a rank or node fails the test."""
    assert culprit.link is not None, culprit
    return culprit.link
