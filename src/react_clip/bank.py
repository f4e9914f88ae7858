from react_clip.label_table import TABLE_FILE as BANK_FILE, TENSOR, LabelTable as LabelBank, match_key  # noqa
