"""Quality: does decoding with a plan still answer as well as full depth? `depthdecay eval` runs it.

A task (`task.py`, one file each) defines the questions and the scoring. `methods` builds the plans to compare,
`answers` runs them in batches, `work_file` lets an interrupted run resume, `report` and `statistics` compute the
figures.
"""
