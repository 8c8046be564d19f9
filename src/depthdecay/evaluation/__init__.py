"""Quality: does decoding by a plan still answer as well as full depth? `depthdecay eval` runs it.

A task (`task.py`, one file each) says what is asked and when an answer is right. `methods` makes the plans to compare,
`answers` runs them in batches, `work_file` lets an interrupted run go on, `report` and `statistics` draw the figures.
"""
