"""Files of weights and their configs, read strictly: what is missing, unknown or misshapen is an error
that lists all of it, and nothing is guessed.

hf      Hugging Face folders: targets and drafts (read), drafts (written)
gguf    GGUF targets;  gguf_layout  how their tensors become those of a Hugging Face checkpoint;  gguf_export
        the way back
draft_gguf  GGUF drafts, read and written;  draft_schema  their metadata;  draft_check  all drafts' tensors
names   tables of parameter names;  schema  config.json of drafts;  gguf_rope  RoPE in GGUF
safetensors_file, gguf_file, gguf_writer  the containers;  tensors  parallel conversion;  fields  typed values
"""
