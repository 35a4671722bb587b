-- The slots of a schedule, as in version 1, with a comparison of the client's time zones with the server's.

-- Returns how many seconds local time was ahead of UTC in a zone, by this server's zone database, or NULL if it does not contain
-- the zone. The setting is used, because AT TIME ZONE interprets names such as 'MET' as abbreviations without daylight saving
-- time.
CREATE FUNCTION @zone_offset_v1@(p_at timestamptz, p_zone text) RETURNS integer
LANGUAGE plpgsql VOLATILE SET "TimeZone" = 'UTC' AS $$
BEGIN
    PERFORM pg_catalog.set_config('TimeZone', p_zone, true);
    RETURN EXTRACT(EPOCH FROM p_at::timestamp - (p_at AT TIME ZONE 'UTC'));
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN NULL;
END $$;

-- The client has computed p_slot from this server's clock and, with p_zone, that local time was p_offset seconds ahead of UTC
-- then. The slot counts from its beginning until p_until, or independently of the clock if that is NULL. p_done is the newest
-- finished slot that the client has read. Returns "granted", "busy" (its lease is held, by the holder that is returned), "done",
-- "moved" (another slot counts by now, or one was finished since the read), or "zone" (this server's zone database returns
-- another offset). For a zone that this server does not know, the row stores the offset with which its slots were computed, and
-- hosts compare this offset.
CREATE FUNCTION @acquire_slot_v2@(
    p_name text, p_slot timestamptz, p_until timestamptz, p_lease text, p_ttl double precision,
    p_max_hold double precision, p_owner text, p_host text, p_pid integer, p_purpose text, p_metadata text,
    p_zone text, p_offset integer, p_done timestamptz
) RETURNS TABLE (
    outcome text, token bigint, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    checkpoint text, kind text, owner text, host text, pid integer, backend_pid integer, application_name text,
    purpose text, since timestamptz, set_back double precision, attempt integer
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    s @slot@;
    l record;
    at timestamptz;
BEGIN
    -- All hosts must compute the same slot.
    IF p_zone IS NOT NULL AND @zone_offset_v1@(p_slot, p_zone) <> p_offset THEN
        outcome := 'zone';
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT t.* INTO s FROM @slot@ AS t WHERE t.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO @slot@ AS t (name) VALUES (p_name) ON CONFLICT (name) DO NOTHING;
    END IF;
    IF s.done IS NULL OR s.done < p_slot THEN
        SELECT t.* INTO STRICT s FROM @slot@ AS t WHERE t.name = p_name FOR NO KEY UPDATE;
    END IF;
    IF s.done >= p_slot THEN
        outcome := 'done';
        token := s.token;
        RETURN NEXT;
        RETURN;
    END IF;
    -- Read after the row is locked, because the slot may have ended during the wait, or the clock may have been set back.
    at := pg_catalog.clock_timestamp();
    IF s.done IS DISTINCT FROM p_done OR p_until IS NOT NULL AND (at < p_slot OR at >= p_until) THEN
        outcome := 'moved';
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT g.* INTO l FROM @acquire_lease_v2@(
        p_name, p_lease, p_ttl, 0, 0, p_max_hold, p_owner, p_host, p_pid, p_purpose, p_metadata, 'slot') AS g;
    IF l.granted THEN
        -- The same grant, requested again after a lost response, counts as one attempt.
        IF s.token IS DISTINCT FROM l.token OR s.tried IS DISTINCT FROM p_slot THEN
            s.attempt := CASE WHEN s.tried = p_slot THEN s.attempt + 1 ELSE 1 END;
        END IF;
        UPDATE @slot@ AS t SET tried = p_slot, attempt = s.attempt, token = l.token, started_at = l.since,
            tried_offset = p_offset, done_offset = CASE WHEN t.done = t.tried THEN t.tried_offset ELSE t.done_offset END
        WHERE t.name = p_name;
    END IF;
    RETURN QUERY SELECT CASE WHEN l.granted THEN 'granted' ELSE 'busy' END, l.token, l.expires_at, l.remaining,
        l.hold_remaining, l.checkpoint, l.kind, l.owner, l.host, l.pid, l.backend_pid, l.application_name, l.purpose, l.since,
        l.set_back, s.attempt;
END $$;
