"""NVIDIA's catalogue of Xids as data: what each number means, and what is to be done at once.

Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, table "Xids", column "Resolution Bucket
(Immediate Action)", as of October 2025 (Ampere and newer). Numbers that it marks as unused are left out. The words are
ours. ``-`` stands where the catalogue names no action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

# Advice to the operator for each action of the catalogue.
ACTIONS: Mapping[str, str] = {
    "IGNORE": "nothing needs to be done",
    "RESTART_APP": "restart the application",
    "RESET_GPU": "reset the GPU",
    "RESTART_BM": "restart the machine",
    "RESTART_VM": "restart the virtual machine",
    "CONTACT_SUPPORT": "contact support",
    "CHECK_MECHANICALS": "check that the device is seated and connected",
    "UPDATE_SWFW": "update software and firmware",
    "CHECK_UVM": "reset the GPU if unified memory or a vGPU is in use",
    "WORKFLOW_XID_45": "follow the other Xid that caused it",
    "WORKFLOW_XID_48": "reset the GPU, or later where Xid 63 shows that the row was remapped",
    "WORKFLOW_NVLINK_ERR": "decode the registers in the line",
    "WORKFLOW_NVLINK5_ERR": "decode the registers in the line",
    "XID_154": "do what the line names",
    "-": "no action is named",
}
# Actions without which nothing runs on the node's GPU any more.
UNFIT = frozenset({"RESET_GPU", "RESTART_BM", "RESTART_VM", "CONTACT_SUPPORT", "CHECK_MECHANICALS"})
# Actions of errors that end with the application, and say nothing about the next one.
PASSING = frozenset({"IGNORE", "RESTART_APP", "WORKFLOW_XID_45"})

FALLEN_OFF_THE_BUS = 79
RECOVERY_ACTION = 154

_TABLE = """
8 RESTART_APP the GPU stopped processing
11 RESTART_APP invalid or corrupted push buffer
13 RESTART_APP graphics engine exception
25 RESTART_APP invalid or illegal push buffer
31 RESTART_APP GPU memory page fault
32 RESTART_APP invalid or corrupted push buffer in DMA
37 IGNORE driver firmware error
38 IGNORE driver firmware watchdog
39 RESTART_APP copy engine 0 exception
40 RESTART_APP copy engine 1 exception
41 RESTART_APP copy engine 2 exception
43 IGNORE the application was stopped by a fault of its own
44 IGNORE graphics engine fault during a context switch
45 WORKFLOW_XID_45 the application's channels were removed
46 RESET_GPU the GPU stopped processing and timed out
48 WORKFLOW_XID_48 double-bit ECC error
54 CHECK_MECHANICALS auxiliary power is not connected
60 RESTART_APP video processor exception
62 RESET_GPU internal micro-controller halted
63 IGNORE memory row remapping recorded
64 RESET_GPU memory row remapping failed
66 IGNORE illegal access by the driver
67 IGNORE illegal access by the driver
68 RESTART_APP video decoder 0 exception
69 RESTART_APP graphics engine class error
70 RESTART_APP copy engine 3 error
71 RESTART_APP copy engine 4 error
72 RESTART_APP copy engine 5 error
74 WORKFLOW_NVLINK_ERR NVLink error
75 RESTART_APP copy engine 6 error
76 RESTART_APP copy engine 7 error
77 RESTART_APP copy engine 8 error
78 UPDATE_SWFW vGPU could not start
79 RESTART_BM the GPU has fallen off the bus
80 RESTART_APP corrupted data sent to the GPU
82 RESTART_APP JPEG decoder 0 error
83 RESTART_APP video decoder 1 error
84 RESTART_APP video decoder 2 error
85 RESTART_APP copy engine 9 error
86 RESTART_APP optical flow exception
88 RESTART_APP video decoder 3 error
89 RESTART_APP video decoder 4 error
92 IGNORE high rate of single-bit ECC errors
93 IGNORE wear limit of the InfoROM exceeded
94 RESTART_APP memory error contained in one application
95 RESET_GPU memory error that was not contained
96 RESTART_APP video decoder 5 error
97 RESTART_APP video decoder 6 error
98 RESTART_APP video decoder 7 error
99 RESTART_APP JPEG decoder 1 error
100 RESTART_APP JPEG decoder 2 error
101 RESTART_APP JPEG decoder 3 error
102 RESTART_APP JPEG decoder 4 error
103 RESTART_APP JPEG decoder 5 error
104 RESTART_APP JPEG decoder 6 error
105 RESTART_APP JPEG decoder 7 error
106 IGNORE SMBPBI test message
107 IGNORE SMBPBI test message
109 RESET_GPU context switch timed out
110 RESET_GPU security fault
119 RESET_GPU the GPU's system processor does not answer
120 RESET_GPU error of the GPU's system processor
121 IGNORE corrected error of the chip-to-chip link
126 RESTART_APP copy engine 10 error
127 RESTART_APP copy engine 11 error
128 RESTART_APP copy engine 12 error
129 RESTART_APP copy engine 13 error
130 RESTART_APP copy engine 14 error
131 RESTART_APP copy engine 15 error
132 RESTART_APP copy engine 16 error
133 RESTART_APP copy engine 17 error
134 RESTART_APP copy engine 18 error
135 RESTART_APP copy engine 19 error
136 RESET_GPU link training failed
137 IGNORE illegal access over NVLink
139 RESTART_APP optical flow 1 error
140 RESET_GPU ECC error that was not recovered
141 IGNORE CUDA fast path error
142 CONTACT_SUPPORT video encoder 3 error
143 RESET_GPU GPU initialization failed
144 WORKFLOW_NVLINK5_ERR NVLink error (SAW)
145 WORKFLOW_NVLINK5_ERR NVLink error (RLW)
146 WORKFLOW_NVLINK5_ERR NVLink error (TLW)
147 WORKFLOW_NVLINK5_ERR NVLink error (TREX)
148 WORKFLOW_NVLINK5_ERR NVLink error (NVLPW_CTRL)
149 WORKFLOW_NVLINK5_ERR NVLink error (NETIR)
150 WORKFLOW_NVLINK5_ERR NVLink error (MSE)
151 RESTART_VM key rotation failed
152 IGNORE deep learning accelerator, memory unit
153 IGNORE deep learning accelerator timed out
154 XID_154 the GPU's recovery action has changed
155 RESET_GPU NVLink error defined by software
156 RESET_GPU a resource was retired
157 IGNORE a resource could not be retired
158 RESET_GPU fatal timeout of the GPU
159 CHECK_UVM error of the coherent host interface
160 IGNORE a channel was retired
161 IGNORE a channel could not be retired
162 - power smoothing engaged again
163 - power smoothing disengaged
164 - power smoothing near the end of its life
165 - power smoothing at the end of its life
166 - unencrypted traffic over NVLink in confidential computing
167 - fatal PCIe timeout
168 - reduced GPU memory capacity
169 - security micro-controller halted
170 - NVLink interrupt in confidential computing
171 - uncorrectable DRAM error, details of Xid 48
172 - uncorrectable SRAM error, details of Xid 48
"""


@dataclass(frozen=True, slots=True)
class Xid:
    """A row of the catalogue."""

    number: int
    action: str  # a key of ACTIONS
    name: str


@cache
def catalogue() -> Mapping[int, Xid]:
    """Every Xid that is known, by its number."""
    rows = (line.split(" ", 2) for line in _TABLE.strip().splitlines())
    return {int(number): Xid(int(number), action, name) for number, action, name in rows}
