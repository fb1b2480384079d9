"""The command line: one module per noun, registered in `app.py`.

Commands parse arguments, call the operations of `client/admin/` and print what they return. They may import every
other package; nothing imports them. Start reading at `app.py`, then at the noun you are interested in.
"""
