"""The hooks: what autograd saves is packed into handles and unpacked again, and which tensors are left alone."""
