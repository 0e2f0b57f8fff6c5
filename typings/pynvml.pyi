# nvidia-ml-py has no types, and is only passed on as Any. This file says so where types are checked strictly.
