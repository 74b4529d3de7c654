def is_line(row):
    return False
