"""The clusters on which drills are played, the scratch job on them, and the context that a drill's parts share.

`Site` is the user's running store, touched only after a yes; EmbeddedSite, NamespacesSite and TightSite are the drill's
own. DrillContext stands here so that scenes and flows need not know the runner. The scratch job:

    start --> in an attempt --put, wait, read--> in an attempt
                  |  ^ restart: kill the ranks, the spares open the next attempt
         stand_by v  |
            in an attempt, with spares          remove (from any state): the store forgets the job
"""
