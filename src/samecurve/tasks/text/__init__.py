"""Parts that every task on text needs: the files of a source, tokenizers, files of token ids."""
