-- Takes an advisory lock and a token: first the transaction-level lock, then the token, and then the session-level lock, which
-- can neither wait nor fail any more. So the lock is held if a token is returned. NULL means that it is not. -1 means that
-- another server process than p_backend executed the statement.
CREATE FUNCTION @lock_with_token_v1@(p_backend integer, p_key bigint, p_name text, p_milliseconds integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @lease@;
    issued bigint;
BEGIN
    IF pg_catalog.pg_backend_pid() <> p_backend THEN
        RETURN -1;
    END IF;
    IF p_milliseconds < 1 THEN
        IF NOT pg_catalog.pg_try_advisory_xact_lock(p_key) THEN
            RETURN NULL;
        END IF;
    ELSE
        BEGIN
            PERFORM pg_catalog.set_config('lock_timeout', p_milliseconds::text, true);
            PERFORM pg_catalog.pg_advisory_xact_lock(p_key);
        EXCEPTION WHEN lock_not_available THEN
            RETURN NULL;
        END;
    END IF;
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    INSERT INTO @lease@ AS l (name, token, acquired_at, renewed_at, expires_at, free_at, released_at)
    VALUES (p_name, 1 + COALESCE((SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name), 0),
        'epoch', 'epoch', 'epoch', 'epoch', 'epoch')
    ON CONFLICT (name) DO UPDATE SET
        token = 1 + GREATEST(l.token, (SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name)),
        -- An expired lease ends here. If the clock is set back, its holder could otherwise ask again and would get this token.
        lease_id = NULL, released_at = COALESCE(l.released_at, pg_catalog.clock_timestamp())
        -- The token is not raised while a lease of this name is held.
        WHERE l.released_at IS NOT NULL OR l.expires_at <= pg_catalog.clock_timestamp()
    RETURNING l.token INTO issued;
    IF issued IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM pg_catalog.pg_advisory_lock(p_key);
    RETURN issued;
END $$;
