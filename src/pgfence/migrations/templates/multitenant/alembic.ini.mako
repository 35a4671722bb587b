# Migrations. The database is taken from MIGRATION_URL, DATABASE_URL or sqlalchemy.url below: do not put a password into this file.

[alembic]
script_location = ${script_location}
prepend_sys_path = .
path_separator = os
sqlalchemy.url = postgresql+psycopg://

[loggers]
keys = root,alembic,pgfence

[handlers]
keys = console

[formatters]
keys = plain

[logger_root]
level = WARNING
handlers = console
qualname =

[logger_alembic]
level = INFO
handlers =
qualname = alembic

[logger_pgfence]
level = INFO
handlers =
qualname = pgfence

[handler_console]
class = StreamHandler
args = (sys.stderr,)
level = NOTSET
formatter = plain

[formatter_plain]
format = %(levelname)-5.5s [%(name)s] %(message)s
