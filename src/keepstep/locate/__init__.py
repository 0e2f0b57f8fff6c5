"""Which rank, link or stage is to blame? Pure: numpy and core only, no I/O, no clock."""
