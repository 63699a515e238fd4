def apply(name): pass
