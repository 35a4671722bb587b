-- Leases, since version 3. The rules are those of version 1: lock the row, then read the clock, then decide. New are:
--
-- Timelines. After a promotion or a restore this server may lack tokens that its predecessor issued. The row stores the
-- timeline of its last grant. A grant on another timeline starts 2^32 higher for each timeline in between.
--
-- Clocks. A time in the row that lies ahead of the clock proves that the clock was set back. The row is then moved back too.
--
-- Session locks. A row whose last token went to a session lock stores its key, and a lease is granted only when that
-- session no longer holds it.

-- Returns 1 if the server does not report its timeline. Amazon Aurora does not unless wal_level is logical, but its failovers
-- lose no commit. A standby does not either, but every caller writes next, and is rejected there as on any read-only server.
CREATE FUNCTION @timeline_v1@() RETURNS integer LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
EXCEPTION WHEN object_not_in_prerequisite_state OR feature_not_supported THEN
    RETURN 1;
END $$;

-- The token after p_token, the last one of a row that was written on timeline p_from; p_to is the current timeline. A lower
-- current timeline means a new cluster, whose timelines started again at 1. The gate is above the row only if the row was set
-- back: by a restore, a failover, or manually.
CREATE FUNCTION @next_token_v1@(p_name text, p_token bigint, p_from integer, p_to integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN 1 + GREATEST(
        (SELECT g.token FROM @gate@ AS g WHERE g.resource = p_name),
        p_token + ((CASE WHEN p_to < p_from THEN p_to ELSE p_to - p_from END)::bigint << 32));
END $$;

-- Creates the row of a name that was never used, and returns whether it did. A concurrent transaction may have created it.
CREATE FUNCTION @add_lease_v1@(p_name text, p_timeline integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO @lease@ AS l (name, token, timeline, acquired_at, renewed_at, expires_at, free_at, released_at)
    VALUES (p_name, @next_token_v1@(p_name, 0, 1, p_timeline), p_timeline, 'epoch', 'epoch', 'epoch', 'epoch', 'epoch')
    ON CONFLICT (name) DO NOTHING;
    RETURN FOUND;
END $$;

-- Moves the times of a locked row that lie ahead of the clock. Each then ends as long after p_at as it ended after the reading
-- from which it was computed, so that a live holder keeps its time, and a dead holder blocks the name for at most one TTL.
-- Returns how many seconds the clock is behind the newest reading.
CREATE FUNCTION @rebase_lease_v1@(p_name text, p_at timestamptz) RETURNS double precision
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r @lease@;
    newest timestamptz;
    floor timestamptz;
    behind double precision;
BEGIN
    SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name;
    newest := GREATEST(r.acquired_at, r.renewed_at, r.released_at);
    behind := EXTRACT(EPOCH FROM newest - p_at);
    floor := r.min_until;
    IF r.acquired_at > p_at THEN
        floor := p_at + (r.min_until - newest);
        r.hold_until := p_at + (r.hold_until - newest);
    END IF;
    IF r.renewed_at > p_at THEN
        r.expires_at := p_at + (r.expires_at - r.renewed_at);
    END IF;
    r.free_at := CASE
        WHEN r.released_at IS NULL THEN GREATEST(r.expires_at + pg_catalog.make_interval(secs => r.lock_delay), floor)
        -- Tested first, because a release under a clock that was set back leaves min_until as computed from the old clock.
        WHEN r.free_at = r.min_until THEN floor
        WHEN r.released_at > p_at THEN p_at + (r.free_at - r.released_at)
        ELSE r.free_at END;
    UPDATE @lease@ AS l SET
        acquired_at = LEAST(l.acquired_at, p_at), renewed_at = LEAST(l.renewed_at, p_at),
        released_at = CASE WHEN l.released_at > p_at THEN p_at ELSE l.released_at END,
        expires_at = r.expires_at, min_until = floor, hold_until = r.hold_until, free_at = r.free_at
    WHERE l.name = p_name;
    RAISE WARNING 'the clock of this server was set back by % s or more after the lease "%" was last written', behind, p_name;
    RETURN behind;
END $$;

-- Whether a session holds an advisory lock on a 64-bit key.
CREATE FUNCTION @session_holds_v1@(p_backend integer, p_key bigint) RETURNS boolean LANGUAGE sql VOLATILE AS $$
    SELECT EXISTS (
        SELECT FROM pg_catalog.pg_locks AS k
        WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 1 AND k.mode = 'ExclusiveLock' AND k.pid = p_backend
        AND ((k.classid::bigint << 32) | k.objid::bigint) = p_key
        AND k.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
    )
$$;

-- If the lease is not granted, the columns describe the holder. "set_back" is set if the row was moved; see rebase_lease_v1.
CREATE FUNCTION @acquire_lease_v2@(
    p_name text, p_lease text, p_ttl double precision, p_min_hold double precision, p_lock_delay double precision,
    p_max_hold double precision, p_owner text, p_host text, p_pid integer, p_purpose text, p_metadata text, p_kind text
) RETURNS TABLE (
    granted boolean, token bigint, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    checkpoint text, kind text, owner text, host text, pid integer, backend_pid integer, application_name text,
    purpose text, since timestamptz, set_back double precision
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    fresh boolean := false;
    current integer := @timeline_v1@();
    at timestamptz;
    next bigint;
    moved double precision;
BEGIN
    -- A token that was lost in a crash would be issued twice, so the commit must be on disk, whatever the session's default is.
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        fresh := @add_lease_v1@(p_name, current);
        SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    END IF;
    at := pg_catalog.clock_timestamp();
    IF r.lease_id = p_lease::uuid AND r.released_at IS NULL AND r.expires_at > at THEN
        -- Requested again after a lost response: the same grant. This is also correct on a new timeline, where no other holder
        -- can have this token. The row keeps its timeline, so that the next token is above all tokens of the old timeline.
        next := r.token;
        current := r.timeline;
    ELSE
        IF r.free_at > at AND GREATEST(r.acquired_at, r.renewed_at, r.released_at) > at THEN
            moved := @rebase_lease_v1@(p_name, at);
            SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name;
        END IF;
        IF r.free_at > at THEN
            RETURN QUERY SELECT false, r.token, r.expires_at,
                EXTRACT(EPOCH FROM r.free_at - at)::double precision, NULL::double precision, NULL::text,
                -- An older release that granted this lease did not update the kind.
                COALESCE(NULLIF(r.kind, 'session lock'), 'lease'), r.owner, r.host, r.pid, r.backend_pid, NULL::text,
                r.purpose, r.acquired_at, moved;
            RETURN;
        ELSIF r.lock_key IS NOT NULL AND @session_holds_v1@(r.backend_pid, r.lock_key) THEN
            RETURN QUERY SELECT false, r.token, NULL::timestamptz,
                1::double precision, NULL::double precision, NULL::text,  -- its end is not announced, so ask again after a second
                r.kind, r.owner, r.host, r.pid, r.backend_pid,
                (SELECT a.application_name FROM pg_catalog.pg_stat_activity AS a WHERE a.pid = r.backend_pid),
                r.purpose, r.acquired_at, moved;
            RETURN;
        ELSIF fresh THEN
            next := r.token;
        ELSE
            next := @next_token_v1@(p_name, r.token, r.timeline, current);
        END IF;
    END IF;
    UPDATE @lease@ AS l SET
        token = next, timeline = current, kind = p_kind, lock_key = NULL,
        lease_id = p_lease::uuid, owner = p_owner, host = p_host, pid = p_pid,
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
        p_kind, p_owner, p_host, p_pid, pg_catalog.pg_backend_pid(), NULL::text, p_purpose, at, moved;
END $$;

-- As in version 1, but a row whose times lie ahead of the clock is moved first, so that max_hold and min_hold end in time. The
-- name is unchanged, because nothing else differs, and heartbeats continue across an upgrade or downgrade of the tables.
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
            IF GREATEST(r.acquired_at, r.renewed_at) > at THEN
                PERFORM @rebase_lease_v1@(p_names[i], at);
                SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_names[i];
            END IF;
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

-- Takes over a lease that its holder handed over. The grant gets a new id, so that a reference works only once. It keeps its
-- token.
CREATE FUNCTION @adopt_lease_v2@(
    p_name text, p_lease text, p_token bigint, p_new text, p_owner text, p_host text, p_pid integer
) RETURNS TABLE (
    outcome text, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    ttl double precision, checkpoint text, purpose text, set_back double precision
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    at timestamptz;
    until timestamptz;
    moved double precision;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    at := pg_catalog.clock_timestamp();
    IF r.token = p_token AND r.lease_id IN (p_lease::uuid, p_new::uuid) AND r.released_at IS NULL AND r.expires_at > at THEN
        IF GREATEST(r.acquired_at, r.renewed_at) > at THEN
            moved := @rebase_lease_v1@(p_name, at);
            SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name;
        END IF;
        until := LEAST(at + pg_catalog.make_interval(secs => r.ttl), r.hold_until);
        UPDATE @lease@ AS l SET lease_id = p_new::uuid, owner = COALESCE(p_owner, l.owner), host = p_host, pid = p_pid,
            backend_pid = pg_catalog.pg_backend_pid(), renewed_at = at, expires_at = until,
            free_at = GREATEST(until + pg_catalog.make_interval(secs => l.lock_delay), l.min_until)
        WHERE l.name = p_name;
        RETURN QUERY SELECT 'ok', until, EXTRACT(EPOCH FROM until - at)::double precision,
            EXTRACT(EPOCH FROM r.hold_until - at)::double precision, r.ttl,
            (SELECT c.data::text FROM @checkpoint@ AS c WHERE c.name = p_name), r.purpose, moved;
    ELSE
        RETURN QUERY SELECT CASE
            WHEN r.evicted >= p_token THEN 'evicted'
            WHEN r.name IS NULL OR r.token <> p_token OR r.lease_id IS DISTINCT FROM p_lease::uuid
                OR r.released_at IS NOT NULL THEN 'superseded'
            WHEN r.hold_until <= at THEN 'overdue'
            ELSE 'expired' END,
            NULL::timestamptz, NULL::double precision, NULL::double precision, NULL::double precision, NULL::text, NULL::text,
            NULL::double precision;
    END IF;
END $$;

-- Evicts a holder: raises the token in the lease's row and in its gate, and adds a row to the audit table. Returns the token that
-- it had and the newest token, or no row if the lease does not exist.
CREATE FUNCTION @evict_lease_v2@(p_name text, p_actor text, p_reason text, p_detail text)
RETURNS TABLE (evicted bigint, newest bigint) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    current integer := @timeline_v1@();
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
    next := @next_token_v1@(p_name, r.token, r.timeline, current);
    -- This waits for writers that are inside. From here on, no transaction with an older token can commit.
    INSERT INTO @gate@ AS g (resource, token, updated_at) VALUES (p_name, next, pg_catalog.clock_timestamp())
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token, updated_at = excluded.updated_at;
    at := pg_catalog.clock_timestamp();
    UPDATE @lease@ AS l SET token = next, timeline = current, evicted = r.token, lease_id = NULL, released_at = at,
        free_at = 'epoch'
    WHERE l.name = p_name;
    INSERT INTO @audit@ (action, resource, actor, reason, at, detail)
    VALUES ('evict', p_name, p_actor, p_reason, at, p_detail::jsonb);
    PERFORM pg_catalog.pg_notify('@channel@', p_name);
    RETURN QUERY SELECT r.token, next;
END $$;
