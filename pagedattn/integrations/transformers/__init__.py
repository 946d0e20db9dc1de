"""Any causal decoder of Hugging Face transformers over the paged cache, through the model's own modules.

`enable` leaves batches, positions and the loop to transformers: its own `generate` then runs over the cache.
`PackedModel` takes the rows of a continuous batch, as an engine has them.

Slower than a decoder written for the purpose, since every operation but attention is the model's own; in return a
family needs no code here. What a paged cache cannot express is refused by name, see `refuse`.
"""

from .attention import NAME, import_transformers
from .generate import disable, enable, new_cache
from .generate import register_generate as register
from .packed_model import PackedModel
from .refusals import refuse

__all__ = ["NAME", "PackedModel", "disable", "enable", "import_transformers", "new_cache", "refuse", "register"]
