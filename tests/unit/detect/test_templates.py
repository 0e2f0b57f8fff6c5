"""Messages that differ in values share a template."""

from __future__ import annotations

from keepstep.detect.templates import TemplateTree


def test_values_become_places() -> None:
    tree = TemplateTree()
    first = tree.add("rank 3 lost its connection to 10.0.0.1:4000 after 12 s")
    second = tree.add("rank 17 lost its connection to 10.0.0.9:4001 after 3 s")
    assert first is not None
    assert first is second
    assert first.count == 2
    assert first.text == "rank <*> lost its connection to <*> after <*> s"


def test_other_messages_have_other_templates() -> None:
    tree = TemplateTree()
    assert tree.add("the disk is full") is not tree.add("the link is down today")
    assert len(tree.templates) == 2


def test_words_that_differ_become_places_as_in_the_paper() -> None:
    tree = TemplateTree(depth=4, similarity=0.5, masks=(), values_count=False)
    tree.add("user alice logged in today")
    found = tree.add("user bob logged in today")
    assert found is not None
    assert found.text == "user <*> logged in today"


def test_there_is_an_end_to_templates() -> None:
    tree = TemplateTree(most=3)
    words = ["alpha beta", "gamma delta epsilon", "zeta", "eta theta iota kappa"]
    assert [tree.add(text) is None for text in words] == [False, False, False, True]
    assert tree.add("zeta") is not None
