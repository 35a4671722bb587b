-- The slots of a schedule. A lease protects each run, and the slot's row records what was done. Callers for the same slot wait
-- for the lock on this row, so that one of them gets the slot and the others see its outcome.

-- The client has computed p_slot from this server's clock. The slot counts until p_until, or indefinitely if that is NULL.
-- Returns "granted", "busy" (its lease is held, by the holder that is returned), "done", or "moved" (another slot counts by now).
CREATE FUNCTION @acquire_slot_v1@(
    p_name text, p_slot timestamptz, p_until timestamptz, p_lease text, p_ttl double precision,
    p_max_hold double precision, p_owner text, p_host text, p_pid integer, p_purpose text, p_metadata text
) RETURNS TABLE (
    outcome text, token bigint, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    checkpoint text, owner text, host text, pid integer, backend_pid integer, purpose text, since timestamptz,
    attempt integer
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    s @slot@;
    l record;
    at timestamptz;
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT t.* INTO s FROM @slot@ AS t WHERE t.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO @slot@ AS t (name) VALUES (p_name) ON CONFLICT (name) DO NOTHING;
    END IF;
    IF s.done IS NULL OR s.done < p_slot THEN
        SELECT t.* INTO STRICT s FROM @slot@ AS t WHERE t.name = p_name FOR NO KEY UPDATE;
    END IF;
    IF s.done >= p_slot THEN
        RETURN QUERY SELECT 'done', s.token, NULL::timestamptz, NULL::double precision, NULL::double precision, NULL::text,
            NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::text, s.finished_at, s.attempt;
        RETURN;
    END IF;
    -- Read after the row is locked, because the slot may have ended during the wait.
    at := pg_catalog.clock_timestamp();
    IF p_until IS NOT NULL AND (at < p_slot OR at >= p_until) THEN
        RETURN QUERY SELECT 'moved', s.token, NULL::timestamptz, NULL::double precision, NULL::double precision, NULL::text,
            NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::text, NULL::timestamptz, s.attempt;
        RETURN;
    END IF;
    SELECT g.* INTO l FROM @acquire_lease_v1@(
        p_name, p_lease, p_ttl, 0, 0, p_max_hold, p_owner, p_host, p_pid, p_purpose, p_metadata) AS g;
    IF l.granted THEN
        -- The same grant, requested again after a lost response, counts as one attempt.
        IF s.token IS DISTINCT FROM l.token OR s.tried IS DISTINCT FROM p_slot THEN
            s.attempt := CASE WHEN s.tried = p_slot THEN s.attempt + 1 ELSE 1 END;
        END IF;
        UPDATE @slot@ AS t SET tried = p_slot, attempt = s.attempt, token = l.token, started_at = l.since
        WHERE t.name = p_name;
    END IF;
    RETURN QUERY SELECT CASE WHEN l.granted THEN 'granted' ELSE 'busy' END, l.token, l.expires_at, l.remaining,
        l.hold_remaining, l.checkpoint, l.owner, l.host, l.pid, l.backend_pid, l.purpose, l.since, s.attempt;
END $$;

-- Ends the run of a slot, either as done or as free for another attempt. Returns the same values as the release of a lease. A
-- client that trusted its lease when it sent this statement has done its work in time, so a late statement is not a loss unless
-- another client has taken over.
CREATE FUNCTION @finish_slot_v1@(p_name text, p_lease text, p_token bigint, p_slot timestamptz, p_done boolean)
RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    s @slot@;
    durable text := pg_catalog.current_setting('synchronous_commit');
    answer text;
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT t.* INTO s FROM @slot@ AS t WHERE t.name = p_name FOR NO KEY UPDATE;
    IF p_done AND s.token = p_token AND s.done >= p_slot THEN
        RETURN 'released';  -- requested again after a lost response
    END IF;
    answer := @release_lease_v1@(p_name, p_lease, p_token);
    IF p_done AND answer IN ('released', 'expired', 'overdue') THEN
        -- Made durable after the release, which need not be durable: a slot that was lost in a crash would run twice.
        PERFORM pg_catalog.set_config('synchronous_commit',
            CASE durable WHEN 'remote_apply' THEN durable ELSE 'on' END, true);
        UPDATE @slot@ AS t SET done = GREATEST(t.done, p_slot), finished_at = pg_catalog.clock_timestamp()
        WHERE t.name = p_name;
        answer := 'released';
    END IF;
    RETURN answer;
END $$;
