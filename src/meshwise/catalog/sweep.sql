-- The results of a sweep: a row a finished point.
CREATE TABLE IF NOT EXISTS points (
    id INTEGER PRIMARY KEY,
    command TEXT NOT NULL UNIQUE,
    point TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    finished_at TEXT NOT NULL,
    seconds REAL NOT NULL,
    document TEXT,
    error TEXT
)
