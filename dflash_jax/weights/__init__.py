"""Files of weights and their configs, read strictly: what is missing, unknown or misshapen is an error
that lists all of it, and nothing is guessed.

hf      Hugging Face folders: targets and drafts (read), drafts (written)
gguf    GGUF targets;  gguf_layout  how their tensors become those of a Hugging Face checkpoint
names   tables of parameter names;  schema  config.json of drafts
safetensors_file, gguf_file  the containers;  tensors  parallel conversion;  fields  typed config values
"""
