import pickle
def encode_error(e): return pickle.dumps(e)
def decode_error(d): return pickle.loads(d)
