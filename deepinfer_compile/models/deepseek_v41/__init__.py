"""DeepSeek-V4.1 in plain PyTorch: a causal encoder-decoder whose upper half reads one shared cache of its lower half.

The reference that compiled programs of this architecture are compared with. Text only: images have no part here.
`config` reads the published keys, `layers` says which layer makes and reads what, `model` is the whole sequence at
once, `generate` is the same with caches as explicit values, `draft` proposes tokens, `sizes` derives parameter counts,
`checkpoint` maps the published tensors to these parameters, `storage` has the published formats of caches.
"""
