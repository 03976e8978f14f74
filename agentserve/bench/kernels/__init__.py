"""Every kernel and the whole model beside this machine's limits, in one run.

`run` is the order of things. What is measured: `sizes`; rows: `products`, `attention`, `operations`,
`steps`. On what: `subject` (the model's variants), `scene` (their common KV), `pages`. How: `timing`
(repeating, alternating), `gauge` (the machine's rates in between), `costs` (what work needs at least),
`clocked` (what is inside the backend's calls), `cases` (what becomes of each).
"""
