"""How all ranks get one step, in rounds.

The controller's machine hands it the ranks' calls and the holders' reports; `single_read.py` and `followers.py` serve
readers, which have no barrier. Which step and which sources is `recovery`'s answer.

    gathering --all ranks--> listing markers --> planning --> staging --all verified, into= fits, fact spread--> loading
        |                                         |  ^           '--a source lacks chunks: planned again
        '--deadline--> failed                  wait for late hosts
    loading --all loaded--> releasing --fact spread--> answered
"""
