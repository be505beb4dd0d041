"""Room for a job's steps: reserved on all hosts at the first put, given back when a newer step is committed.

The controller's machine calls it, and so do commit, repair and restore, which need room or free it. It never looks at
an arena: hosts claim and refuse, with their numbers.

    ranks ask --all asked, or one has put--> hosts ordered --all claimed--> fact 'room claimed' --> put
      '--deadline--> refused                    '--one refuses--> refused on all ranks, with its numbers
"""
