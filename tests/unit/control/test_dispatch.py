"""The tables that say who handles what name every kind of order and effect."""

from __future__ import annotations

from typing import get_args

from keepstep.control.control_server import ControlServer
from keepstep.control.controller import Controller
from keepstep.control.effects import Effect
from keepstep.control.membership.reforming_orders import Order


def test_every_order_of_the_recovery_has_a_handler() -> None:
    assert set(get_args(Order)) == set(Controller._ORDERS)


def test_every_effect_is_carried_out() -> None:
    assert set(get_args(Effect)) == set(ControlServer._EFFECTS)
