"""Copies between device memory and host memory, and copies that overlap training.

The client's puts and the codec call it.

    queued --moves made by copy thread and fence--> compared with the digests --equal--> submitted
       '--changed, freed, too late--> the step fails, by the tensor's name
"""
