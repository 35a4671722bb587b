-- Leases. Each function is one round trip in a separate transaction, and is correct at every isolation level: it locks the row
-- first, then reads the clock, and only then decides. A row is never deleted, because its tokens would start again.

CREATE FUNCTION @acquire_lease_v1@(
    p_name text, p_lease text, p_ttl double precision, p_min_hold double precision, p_lock_delay double precision,
    p_max_hold double precision, p_owner text, p_host text, p_pid integer, p_purpose text, p_metadata text
) RETURNS TABLE (
    granted boolean, token bigint, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    checkpoint text, owner text, host text, pid integer, backend_pid integer, purpose text, since timestamptz
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    fresh boolean := false;
    at timestamptz;
    next bigint;
BEGIN
    -- A token that was lost in a crash would be issued twice, so the commit must be on disk, whatever the session's default is.
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        -- The token is above that of the gate, because the lease's row may have been deleted.
        INSERT INTO @lease@ AS l (name, token, acquired_at, renewed_at, expires_at, free_at, released_at)
        VALUES (p_name, 1 + COALESCE((SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name), 0),
            'epoch', 'epoch', 'epoch', 'epoch', 'epoch')
        ON CONFLICT (name) DO NOTHING;
        fresh := FOUND;
        SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    END IF;
    at := pg_catalog.clock_timestamp();
    IF r.lease_id = p_lease::uuid AND r.released_at IS NULL AND r.expires_at > at THEN
        next := r.token;  -- requested again after a lost response: the same grant
    ELSIF r.free_at > at THEN
        RETURN QUERY SELECT false, r.token, r.expires_at,
            EXTRACT(EPOCH FROM r.free_at - at)::double precision, NULL::double precision, NULL::text,
            r.owner, r.host, r.pid, r.backend_pid, r.purpose, r.acquired_at;
        RETURN;
    ELSIF fresh THEN
        next := r.token;
    ELSE
        -- The gate is above the row only if the row was set back: by a restore, a failover, or manually.
        next := 1 + GREATEST(r.token, (SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name));
    END IF;
    UPDATE @lease@ AS l SET
        token = next, lease_id = p_lease::uuid, owner = p_owner, host = p_host, pid = p_pid,
        backend_pid = pg_catalog.pg_backend_pid(), purpose = p_purpose, metadata = p_metadata::jsonb,
        ttl = p_ttl, lock_delay = p_lock_delay,
        acquired_at = at, renewed_at = at, released_at = NULL,
        min_until = at + pg_catalog.make_interval(secs => p_min_hold),
        hold_until = at + pg_catalog.make_interval(secs => p_max_hold),
        expires_at = at + pg_catalog.make_interval(secs => LEAST(p_ttl, p_max_hold)),
        free_at = at + pg_catalog.make_interval(secs => GREATEST(LEAST(p_ttl, p_max_hold) + p_lock_delay, p_min_hold))
    WHERE l.name = p_name;
    RETURN QUERY SELECT true, next, at + pg_catalog.make_interval(secs => LEAST(p_ttl, p_max_hold)),
        LEAST(p_ttl, p_max_hold), p_max_hold,
        (SELECT c.data::text FROM @checkpoint@ AS c WHERE c.name = p_name),
        p_owner, p_host, p_pid, pg_catalog.pg_backend_pid(), p_purpose, at;
END $$;

-- Renews several leases. Returns a JSON array with one element for each lease, in order: ["ok", epoch of the new expiry, seconds
-- left], ["busy"] (the row is locked now: ask again), or ["lost", "expired" | "superseded" | "evicted" | "overdue"].
CREATE FUNCTION @renew_leases_v1@(
    p_names text[], p_leases text[], p_tokens bigint[], p_ttls double precision[]
) RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @lease@;
    at timestamptz;
    until timestamptz;
    answers jsonb[] := '{}';
    answer jsonb;
BEGIN
    -- If a renewal was lost in a crash, another holder would get the lease while this holder still trusts it.
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    FOR i IN 1 .. COALESCE(pg_catalog.cardinality(p_names), 0) LOOP
        -- A row that another session has locked must not delay the others.
        SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_names[i] FOR NO KEY UPDATE SKIP LOCKED;
        at := pg_catalog.clock_timestamp();
        IF NOT FOUND THEN
            PERFORM 1 FROM @lease@ AS l WHERE l.name = p_names[i];
            answer := CASE WHEN FOUND THEN '["busy"]'::jsonb ELSE '["lost", "superseded"]'::jsonb END;
        ELSIF r.token = p_tokens[i] AND r.lease_id = p_leases[i]::uuid AND r.released_at IS NULL AND r.expires_at > at THEN
            until := LEAST(at + pg_catalog.make_interval(secs => p_ttls[i]), r.hold_until);
            UPDATE @lease@ AS l SET renewed_at = at, expires_at = until, ttl = p_ttls[i],
                free_at = GREATEST(until + pg_catalog.make_interval(secs => l.lock_delay), l.min_until)
            WHERE l.name = p_names[i];
            answer := pg_catalog.jsonb_build_array('ok', EXTRACT(EPOCH FROM until), EXTRACT(EPOCH FROM until - at));
        ELSE
            answer := pg_catalog.jsonb_build_array('lost', CASE
                WHEN r.evicted >= p_tokens[i] THEN 'evicted'
                WHEN r.token <> p_tokens[i] OR r.lease_id <> p_leases[i]::uuid OR r.released_at IS NOT NULL THEN 'superseded'
                WHEN r.hold_until <= at THEN 'overdue'
                ELSE 'expired' END);
        END IF;
        answers := answers || answer;
    END LOOP;
    RETURN pg_catalog.array_to_json(answers)::text;
END $$;

-- Returns "released", or why the lease was not held any more: "expired", "overdue", "superseded" or "evicted". An expired lease
-- without a new holder is ended too, and its lock_delay still counts.
CREATE FUNCTION @release_lease_v1@(p_name text, p_lease text, p_token bigint) RETURNS text
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @lease@;
    at timestamptz;
BEGIN
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);  -- a lease whose release was lost in a crash expires
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    at := pg_catalog.clock_timestamp();
    IF r.evicted >= p_token THEN
        RETURN 'evicted';
    ELSIF r.name IS NULL OR r.token <> p_token OR r.lease_id IS DISTINCT FROM p_lease::uuid OR r.released_at IS NOT NULL THEN
        RETURN 'superseded';
    END IF;
    UPDATE @lease@ AS l SET released_at = at,
        -- A free lease gets 'epoch' and not the current time, because the clock may be set back.
        free_at = CASE WHEN l.expires_at <= at THEN l.free_at WHEN l.min_until > at THEN l.min_until ELSE 'epoch' END
    WHERE l.name = p_name;
    PERFORM pg_catalog.pg_notify('@channel@', p_name);
    RETURN CASE WHEN r.expires_at > at THEN 'released' WHEN r.hold_until <= at THEN 'overdue' ELSE 'expired' END;
END $$;

-- Ends a grant whose response was lost, by the id that the client chose for it, because its token is not known.
CREATE FUNCTION @forget_lease_v1@(p_name text, p_lease text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    -- The row is locked first, because the grant may not be committed yet, and its row would not be found by its id.
    PERFORM 1 FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    UPDATE @lease@ AS l SET released_at = pg_catalog.clock_timestamp(), free_at = 'epoch'
    WHERE l.name = p_name AND l.lease_id = p_lease::uuid AND l.released_at IS NULL;
    IF FOUND THEN
        PERFORM pg_catalog.pg_notify('@channel@', p_name);
    END IF;
    RETURN FOUND;
END $$;

-- Takes over a lease that its holder handed over. The grant gets a new id, so that a reference works only once. It keeps its
-- token.
CREATE FUNCTION @adopt_lease_v1@(
    p_name text, p_lease text, p_token bigint, p_new text, p_owner text, p_host text, p_pid integer
) RETURNS TABLE (
    outcome text, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    ttl double precision, checkpoint text, purpose text
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    at timestamptz;
    until timestamptz;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    at := pg_catalog.clock_timestamp();
    IF r.token = p_token AND r.lease_id IN (p_lease::uuid, p_new::uuid) AND r.released_at IS NULL AND r.expires_at > at THEN
        until := LEAST(at + pg_catalog.make_interval(secs => r.ttl), r.hold_until);
        UPDATE @lease@ AS l SET lease_id = p_new::uuid, owner = COALESCE(p_owner, l.owner), host = p_host, pid = p_pid,
            backend_pid = pg_catalog.pg_backend_pid(), renewed_at = at, expires_at = until,
            free_at = GREATEST(until + pg_catalog.make_interval(secs => l.lock_delay), l.min_until)
        WHERE l.name = p_name;
        RETURN QUERY SELECT 'ok', until, EXTRACT(EPOCH FROM until - at)::double precision,
            EXTRACT(EPOCH FROM r.hold_until - at)::double precision, r.ttl,
            (SELECT c.data::text FROM @checkpoint@ AS c WHERE c.name = p_name), r.purpose;
    ELSE
        RETURN QUERY SELECT CASE
            WHEN r.evicted >= p_token THEN 'evicted'
            WHEN r.name IS NULL OR r.token <> p_token OR r.lease_id IS DISTINCT FROM p_lease::uuid
                OR r.released_at IS NOT NULL THEN 'superseded'
            WHEN r.hold_until <= at THEN 'overdue'
            ELSE 'expired' END,
            NULL::timestamptz, NULL::double precision, NULL::double precision, NULL::double precision, NULL::text, NULL::text;
    END IF;
END $$;

-- Evicts a holder: raises the token in the lease's row and in its gate, and adds a row to the audit table. Returns the token that
-- it had and the newest token, or no row if the lease does not exist.
CREATE FUNCTION @evict_lease_v1@(p_name text, p_actor text, p_reason text, p_detail text)
RETURNS TABLE (evicted bigint, newest bigint) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    at timestamptz;
    next bigint;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    next := 1 + GREATEST(r.token, (SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name));
    -- This waits for writers that are inside. From here on, no transaction with an older token can commit.
    INSERT INTO @gate@ AS g (resource, token, updated_at) VALUES (p_name, next, pg_catalog.clock_timestamp())
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token, updated_at = excluded.updated_at;
    at := pg_catalog.clock_timestamp();
    UPDATE @lease@ AS l SET token = next, evicted = r.token, lease_id = NULL, released_at = at, free_at = 'epoch'
    WHERE l.name = p_name;
    INSERT INTO @audit@ (action, resource, actor, reason, at, detail)
    VALUES ('evict', p_name, p_actor, p_reason, at, p_detail::jsonb);
    PERFORM pg_catalog.pg_notify('@channel@', p_name);
    RETURN QUERY SELECT r.token, next;
END $$;
