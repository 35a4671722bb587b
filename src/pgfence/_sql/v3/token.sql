-- Takes an advisory lock and a token: first the transaction-level lock, then the token, and then the session-level lock, which
-- can neither wait nor fail any more. So the lock is held if a token is returned. NULL means that it is not. -1 means that
-- another server process than p_backend executed the statement.
--
-- The row tells leases of the same name which session holds the lock. A lease and the lock are never granted together: the later
-- one finds, at the row, the lease or the session-level lock of the earlier one, which is taken before the row's lock is
-- released.
CREATE FUNCTION @lock_with_token_v2@(
    p_backend integer, p_key bigint, p_name text, p_milliseconds integer, p_host text, p_pid integer
) RETURNS bigint LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @lease@;
    fresh boolean := false;
    current integer;
    at timestamptz;
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
    current := @timeline_v1@();
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        fresh := @add_lease_v1@(p_name, current);
        SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    END IF;
    at := pg_catalog.clock_timestamp();
    IF r.free_at > at AND GREATEST(r.acquired_at, r.renewed_at, r.released_at) > at THEN
        PERFORM @rebase_lease_v1@(p_name, at);
        SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name;
    END IF;
    -- A lease of this name is held, or its min_hold or lock_delay is not over.
    IF r.free_at > at THEN
        RETURN NULL;
    END IF;
    issued := CASE WHEN fresh THEN r.token ELSE @next_token_v1@(p_name, r.token, r.timeline, current) END;
    -- The grant before ends here, even an expired one: with the clock set back, its holder would get this token.
    UPDATE @lease@ AS l SET
        token = issued, timeline = current, kind = 'session lock', lock_key = p_key,
        lease_id = NULL, owner = NULL, host = p_host, pid = p_pid, backend_pid = p_backend, purpose = NULL, metadata = NULL,
        ttl = NULL, lock_delay = 0, acquired_at = at, renewed_at = at, expires_at = at, free_at = 'epoch', released_at = at,
        min_until = NULL, hold_until = NULL
    WHERE l.name = p_name;
    PERFORM pg_catalog.pg_advisory_lock(p_key);
    RETURN issued;
END $$;
