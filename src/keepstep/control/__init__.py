"""The job's controller: hears agents and launchers, places nodes, turns findings into incidents and verdicts.

Start reading in ``controller.py`` (messages and time in, effects out, no I/O), then ``cases.py`` (what is wrong);
``server.py`` is the rim around it.
"""

from keepstep.control.controller import Controller
from keepstep.control.effects import (
    Disconnect,
    Effect,
    Exit,
    Reach,
    Say,
    Send,
    StoreCouncil,
    StorePlacement,
    StoreStop,
    Tell,
    WriteIncident,
)
from keepstep.control.incidents.locators import LibraryLocators, Locators
from keepstep.control.settings import Settings

__all__ = [
    "Controller",
    "Disconnect",
    "Effect",
    "Exit",
    "LibraryLocators",
    "Locators",
    "Reach",
    "Say",
    "Send",
    "Settings",
    "StoreCouncil",
    "StorePlacement",
    "StoreStop",
    "Tell",
    "WriteIncident",
]
