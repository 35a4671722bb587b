-- Rate limits, since version 5. Unit k of a limit of L is stored in slot k mod L, which contained unit k - L before. So the
-- oldest of the last L units is overwritten last. n more units are allowed if that unit is at least "per" seconds old, and then
-- no window of that length contains more than L units. The times never decrease in the order of the units.

-- The outcome is "taken", "busy" or "mismatch" (another limit is stored). If it is "busy", the units may be allowed after the
-- returned number of seconds.
CREATE FUNCTION @take_v1@(p_name text, p_limit integer, p_per double precision, p_n integer)
RETURNS TABLE (outcome text, remaining double precision, max_takes integer, per double precision)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @rate_limit@;
    at timestamptz;
    oldest timestamptz;
    allowed_at timestamptz;
    behind interval;
BEGIN
    -- A take that was lost in a crash would be allowed again, so the commit must be on disk, whatever the session's default is.
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT h.* INTO r FROM @rate_limit@ AS h WHERE h.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        INSERT INTO @rate_limit@ (name, max_takes, per, taken, newest) VALUES (p_name, p_limit, p_per, 0, 'epoch')
        ON CONFLICT DO NOTHING;
        SELECT h.* INTO STRICT r FROM @rate_limit@ AS h WHERE h.name = p_name FOR NO KEY UPDATE;
    END IF;
    IF r.max_takes <> p_limit OR r.per <> p_per THEN
        RETURN QUERY SELECT 'mismatch', NULL::double precision, r.max_takes, r.per;
        RETURN;
    END IF;
    at := pg_catalog.clock_timestamp();
    IF r.newest > at THEN
        -- The clock was set back. All times are moved back with it, as if no time had passed since the newest one.
        behind := r.newest - at;
        UPDATE @rate_take@ AS t SET taken_at = t.taken_at - behind WHERE t.name = p_name;
        r.newest := at;
    END IF;
    SELECT t.taken_at INTO oldest FROM @rate_take@ AS t
    WHERE t.name = p_name AND t.slot = (r.taken + p_n - 1) % r.max_takes AND r.taken + p_n > r.max_takes;
    allowed_at := oldest + pg_catalog.make_interval(secs => r.per);
    IF allowed_at > at THEN
        UPDATE @rate_limit@ AS h SET newest = r.newest WHERE h.name = p_name AND behind IS NOT NULL;
        RETURN QUERY SELECT 'busy', EXTRACT(EPOCH FROM allowed_at - at)::double precision, r.max_takes, r.per;
        RETURN;
    END IF;
    INSERT INTO @rate_take@ AS t (name, slot, taken_at)
    SELECT p_name, (k % r.max_takes)::integer, at FROM pg_catalog.generate_series(r.taken, r.taken + p_n - 1) AS k
    ON CONFLICT (name, slot) DO UPDATE SET taken_at = excluded.taken_at;
    UPDATE @rate_limit@ AS h SET taken = r.taken + p_n, newest = at WHERE h.name = p_name;
    RETURN QUERY SELECT 'taken', 0::double precision, r.max_takes, r.per;
END $$;

-- Stores another limit. The last units up to the new number are kept, so that the new limit applies from the first take on.
CREATE FUNCTION @change_rate_v1@(p_name text, p_limit integer, p_per double precision) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @rate_limit@;
    moments timestamptz[];
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    INSERT INTO @rate_limit@ (name, max_takes, per, taken, newest) VALUES (p_name, p_limit, p_per, 0, 'epoch')
    ON CONFLICT DO NOTHING;
    SELECT h.* INTO STRICT r FROM @rate_limit@ AS h WHERE h.name = p_name FOR NO KEY UPDATE;
    IF r.max_takes <> p_limit THEN
        moments := ARRAY(
            SELECT t.taken_at FROM pg_catalog.generate_series(GREATEST(r.taken - LEAST(r.max_takes, p_limit), 0), r.taken - 1) AS k
            JOIN @rate_take@ AS t ON t.name = p_name AND t.slot = k % r.max_takes ORDER BY k);
        DELETE FROM @rate_take@ AS t WHERE t.name = p_name;
        INSERT INTO @rate_take@ (name, slot, taken_at)
        SELECT p_name, m.i - 1, m.taken_at FROM pg_catalog.unnest(moments) WITH ORDINALITY AS m(taken_at, i);
        r.taken := pg_catalog.cardinality(moments);
    END IF;
    UPDATE @rate_limit@ AS h SET max_takes = p_limit, per = p_per, taken = r.taken WHERE h.name = p_name;
END $$;
