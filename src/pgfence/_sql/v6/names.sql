-- The names of advisory locks, so that operators can translate a number in pg_locks back into a name.

-- Stores names by their keys. Returns a stored name that has the key of another name in the list (a collision), or NULL. Storing
-- a name must not break the lock, so every error returns NULL too.
CREATE FUNCTION @note_names_v1@(p_keys bigint[], p_names text[]) RETURNS text
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    -- A name that was lost in a crash is stored again by the next process.
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true), pg_catalog.set_config('lock_timeout', '100ms', true);
    -- The rows are inserted in the order of the keys, so that two processes cannot wait for each other.
    INSERT INTO @lock_name@ AS n (key, name, seen_at)
    SELECT u.key, u.name, pg_catalog.clock_timestamp()
    FROM ROWS FROM (pg_catalog.unnest(p_keys), pg_catalog.unnest(p_names)) AS u(key, name) ORDER BY u.key
    ON CONFLICT (key) DO UPDATE SET seen_at = excluded.seen_at
    WHERE n.name = excluded.name AND n.seen_at < excluded.seen_at - interval '1 day';
    -- This is a separate statement, so that it sees what was committed during the wait.
    RETURN (SELECT n.name FROM ROWS FROM (pg_catalog.unnest(p_keys), pg_catalog.unnest(p_names)) AS u(key, name)
        JOIN @lock_name@ AS n ON n.key = u.key WHERE n.name <> u.name LIMIT 1);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;
