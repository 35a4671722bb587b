-- Semaphores, since version 5. The permits of the semaphore NAME are the lease rows NAME#1 to NAME#N, each with its own token
-- series. Functions that acquire permits, end a grant by its id, or change the number of permits lock the semaphore's own row
-- first, so that between counting and acquiring, the number of free permits can only grow. Releases and renewals do not lock it.
-- Several permits are locked in the order of their numbers, so that two sessions cannot wait for each other.

-- Creates the rows of permits that were never used.
CREATE FUNCTION @add_permits_v1@(p_name text, p_from integer, p_to integer) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    current integer := @timeline_v1@();
BEGIN
    FOR i IN p_from .. p_to LOOP
        PERFORM @add_lease_v1@(p_name || '#' || i, current);
    END LOOP;
END $$;

-- The outcome is "granted", "busy", "mismatch" (another number of permits is stored) or "heavy" (the weight is above the stored
-- number). If it is "busy", the columns from "kind" on describe the permit that becomes free first.
CREATE FUNCTION @acquire_permits_v1@(
    p_name text, p_permits integer, p_weight integer, p_follow boolean, p_lease text, p_ttl double precision,
    p_max_hold double precision, p_owner text, p_host text, p_pid integer, p_purpose text, p_waiter text,
    p_waited double precision
) RETURNS TABLE (
    outcome text, permits integer, names text[], tokens bigint[], expires_at timestamptz, remaining double precision,
    hold_remaining double precision, checkpoint text, set_back double precision, kind text, owner text, host text, pid integer,
    backend_pid integer, application_name text, purpose text, token bigint, since timestamptz, holder_expires_at timestamptz
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    size integer;
    highest integer;
    all_names text[];
    used integer;
    ahead integer := 0;
    taken text[];
    issued bigint[] := '{}';
    next bigint;
    r @lease@;
    current integer;
    at timestamptz;
    moved double precision;
    length double precision := LEAST(p_ttl, p_max_hold);
BEGIN
    -- A token that was lost in a crash would be issued twice, so the commit must be on disk, whatever the session's default is.
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT s.permits, s.highest INTO size, highest FROM @semaphore@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        INSERT INTO @semaphore@ (name, permits, highest) VALUES (p_name, p_permits, 0) ON CONFLICT DO NOTHING;
        SELECT s.permits, s.highest INTO STRICT size, highest FROM @semaphore@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    END IF;
    IF size <> p_permits AND NOT p_follow THEN
        RETURN QUERY SELECT 'mismatch', size, NULL::text[], NULL::bigint[], NULL::timestamptz, NULL::double precision,
            NULL::double precision, NULL::text, NULL::double precision, NULL::text, NULL::text, NULL::text, NULL::integer,
            NULL::integer, NULL::text, NULL::text, NULL::bigint, NULL::timestamptz, NULL::timestamptz;
        RETURN;
    ELSIF p_weight > size THEN
        RETURN QUERY SELECT 'heavy', size, NULL::text[], NULL::bigint[], NULL::timestamptz, NULL::double precision,
            NULL::double precision, NULL::text, NULL::double precision, NULL::text, NULL::text, NULL::text, NULL::integer,
            NULL::integer, NULL::text, NULL::text, NULL::bigint, NULL::timestamptz, NULL::timestamptz;
        RETURN;
    END IF;
    IF highest < size THEN
        PERFORM @add_permits_v1@(p_name, highest + 1, size);
        UPDATE @semaphore@ AS s SET highest = size WHERE s.name = p_name;
        highest := size;
    END IF;
    all_names := ARRAY(SELECT p_name || '#' || i FROM pg_catalog.generate_series(1, highest) AS i);
    IF highest > size THEN
        -- Permits above the number count until they are free. A renewal in progress may extend a permit that looks expired, so
        -- wait for it.
        PERFORM 1 FROM pg_catalog.unnest(all_names) WITH ORDINALITY AS n(name, i) JOIN @lease@ AS l ON l.name = n.name
        WHERE l.released_at IS NULL AND l.free_at <= pg_catalog.clock_timestamp()
        ORDER BY n.i FOR NO KEY UPDATE OF l;
    END IF;
    at := pg_catalog.clock_timestamp();
    FOR r IN
        SELECT l.* FROM pg_catalog.unnest(all_names) WITH ORDINALITY AS n(name, i) JOIN @lease@ AS l ON l.name = n.name
        WHERE l.free_at > at AND GREATEST(l.acquired_at, l.renewed_at, l.released_at) > at
        ORDER BY n.i FOR NO KEY UPDATE OF l
    LOOP
        moved := GREATEST(moved, @rebase_lease_v1@(r.name, at));
    END LOOP;
    SELECT pg_catalog.count(*) INTO used FROM @lease@ AS l
    WHERE l.name = ANY (all_names)
    AND (l.free_at > at OR l.lock_key IS NOT NULL AND @session_holds_v1@(l.backend_pid, l.lock_key));
    IF highest > size AND NOT EXISTS (
        SELECT FROM @lease@ AS l WHERE l.name = ANY (all_names[size + 1 : highest])
        AND (l.free_at > at OR l.lock_key IS NOT NULL AND @session_holds_v1@(l.backend_pid, l.lock_key))
    ) THEN
        UPDATE @semaphore@ AS s SET highest = size WHERE s.name = p_name;
    END IF;
    -- Waiters of a fair semaphore come first, in the order of their arrival. A waiter that has not asked for 3 s does not count.
    SELECT COALESCE(pg_catalog.sum(w.weight), 0) INTO ahead FROM @permit_waiter@ AS w
    WHERE w.name = p_name AND w.seen_at BETWEEN at - '3 s'::interval AND at AND w.waiter IS DISTINCT FROM p_waiter::uuid
    AND (p_waiter IS NULL OR (w.arrived_at, w.waiter) < (
        COALESCE((SELECT o.arrived_at FROM @permit_waiter@ AS o WHERE o.name = p_name AND o.waiter = p_waiter::uuid),
            at - pg_catalog.make_interval(secs => p_waited)), p_waiter::uuid));
    IF size - used >= ahead + p_weight THEN
        -- The rows are locked and checked again, because a renewal in progress may extend a permit that looked expired.
        taken := ARRAY(
            SELECT l.name FROM pg_catalog.unnest(all_names[1 : size]) WITH ORDINALITY AS n(name, i)
            JOIN @lease@ AS l ON l.name = n.name
            WHERE l.free_at <= at AND (l.lock_key IS NULL OR NOT @session_holds_v1@(l.backend_pid, l.lock_key))
            ORDER BY n.i LIMIT p_weight FOR NO KEY UPDATE OF l);
    END IF;
    IF pg_catalog.cardinality(taken) = p_weight THEN
        current := @timeline_v1@();
        FOR i IN 1 .. p_weight LOOP
            SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = taken[i];
            next := @next_token_v1@(r.name, r.token, r.timeline, current);
            issued := issued || next;
            UPDATE @lease@ AS l SET
                token = next, timeline = current, kind = 'permit', lock_key = NULL,
                lease_id = p_lease::uuid, owner = p_owner, host = p_host, pid = p_pid,
                backend_pid = pg_catalog.pg_backend_pid(), purpose = p_purpose, metadata = NULL, ttl = p_ttl, lock_delay = 0,
                acquired_at = at, renewed_at = at, released_at = NULL, min_until = at,
                hold_until = at + pg_catalog.make_interval(secs => p_max_hold),
                expires_at = at + pg_catalog.make_interval(secs => length),
                free_at = at + pg_catalog.make_interval(secs => length)
            WHERE l.name = r.name;
        END LOOP;
        DELETE FROM @permit_waiter@ AS w WHERE w.name = p_name AND w.waiter = p_waiter::uuid;
        RETURN QUERY SELECT 'granted', size, taken, issued, at + pg_catalog.make_interval(secs => length), length, p_max_hold,
            (SELECT c.data::text FROM @checkpoint@ AS c WHERE c.name = taken[1]), moved, 'permit', p_owner, p_host, p_pid,
            pg_catalog.pg_backend_pid(), NULL::text, p_purpose, issued[1], at, NULL::timestamptz;
        RETURN;
    END IF;
    IF p_waiter IS NOT NULL THEN
        DELETE FROM @permit_waiter@ AS w WHERE w.name = p_name AND NOT w.seen_at BETWEEN at - '3 s'::interval AND at;
        INSERT INTO @permit_waiter@ AS w (name, waiter, weight, arrived_at, seen_at)
        VALUES (p_name, p_waiter::uuid, p_weight, at - pg_catalog.make_interval(secs => p_waited), at)
        ON CONFLICT (name, waiter) DO UPDATE SET seen_at = excluded.seen_at;
    END IF;
    SELECT l.* INTO r FROM @lease@ AS l
    WHERE l.name = ANY (all_names)
    AND (l.free_at > at OR l.lock_key IS NOT NULL AND @session_holds_v1@(l.backend_pid, l.lock_key))
    ORDER BY l.lock_key IS NOT NULL, l.free_at LIMIT 1;
    RETURN QUERY SELECT 'busy', size, NULL::text[], NULL::bigint[], NULL::timestamptz,
        CASE WHEN r.lock_key IS NULL THEN COALESCE(EXTRACT(EPOCH FROM r.free_at - at)::double precision, 1) ELSE 1 END,
        NULL::double precision, NULL::text, moved, r.kind, r.owner, r.host, r.pid, r.backend_pid, NULL::text, r.purpose, r.token,
        r.acquired_at, r.expires_at;
END $$;

-- Releases the permits of one grant. Returns "released", or why it was not held any more.
CREATE FUNCTION @release_permits_v1@(p_names text[], p_lease text, p_tokens bigint[]) RETURNS text
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    answer text;
    worst text := 'released';
BEGIN
    FOR i IN 1 .. pg_catalog.cardinality(p_names) LOOP
        answer := @release_lease_v1@(p_names[i], p_lease, p_tokens[i]);
        IF worst = 'released' THEN
            worst := answer;
        END IF;
    END LOOP;
    RETURN worst;
END $$;

-- Ends a grant whose response was lost, by the id that the client chose for it.
CREATE FUNCTION @forget_permits_v1@(p_name text, p_lease text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    highest integer;
    ended boolean := false;
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    -- The row is locked first, because the grant may not be committed yet.
    SELECT s.highest INTO highest FROM @semaphore@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    FOR i IN 1 .. COALESCE(highest, 0) LOOP
        UPDATE @lease@ AS l SET released_at = pg_catalog.clock_timestamp(), free_at = 'epoch'
        WHERE l.name = p_name || '#' || i AND l.lease_id = p_lease::uuid AND l.released_at IS NULL;
        ended := ended OR FOUND;
    END LOOP;
    IF ended THEN
        PERFORM pg_catalog.pg_notify('@channel@', p_name);
    END IF;
    RETURN ended;
END $$;

-- Removes a waiter of a fair semaphore from the queue.
CREATE FUNCTION @leave_permits_v1@(p_name text, p_waiter text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    -- The row is locked first, because the entry may not be committed yet.
    PERFORM 1 FROM @semaphore@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    DELETE FROM @permit_waiter@ AS w WHERE w.name = p_name AND w.waiter = p_waiter::uuid;
    IF FOUND THEN
        PERFORM pg_catalog.pg_notify('@channel@', p_name);
    END IF;
    RETURN FOUND;
END $$;

-- Stores the number of permits. Permits above it that are held count until they are released.
CREATE FUNCTION @resize_semaphore_v1@(p_name text, p_permits integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    before integer;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT s.permits INTO before FROM @semaphore@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    INSERT INTO @semaphore@ AS s (name, permits, highest) VALUES (p_name, p_permits, 0)
    ON CONFLICT (name) DO UPDATE SET permits = excluded.permits;
    PERFORM pg_catalog.pg_notify('@channel@', p_name);
    RETURN before;
END $$;
