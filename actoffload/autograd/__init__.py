"""The hooks: they pack the tensors that autograd saves into handles, unpack them, and decide which never move."""
