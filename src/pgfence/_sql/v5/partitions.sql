-- Partitions, since version 5. Partition i of the set NAME is the lease row NAME/i, with its own token series. A worker that
-- joins has a row in the table of members, which it renews like a lease. A worker that acquires a partition locks the row of the
-- set FOR SHARE, and a change of the number of partitions locks it FOR NO KEY UPDATE, so that no partition is acquired under an
-- old number.

-- The partition of a key, from 0 to p_count - 1; for sha256 the first 8 bytes of the hash without the sign, modulo p_count; murmur2 is
-- the partition that Kafka's default partitioner chooses. Both hash the key in UTF-8. No release changes what this returns, so that it
-- may be used in an index.
CREATE FUNCTION @partition_for_v1@(p_key text, p_count integer, p_hash text DEFAULT 'sha256') RETURNS integer
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    bytes bytea := pg_catalog.convert_to(p_key, 'UTF8');
    size integer := pg_catalog.length(bytes);
    whole integer := size / 4 * 4;
    h bigint;
    k bigint;
BEGIN
    IF p_count < 1 THEN
        RAISE EXCEPTION 'the number of partitions must be 1 or more, not %', p_count USING ERRCODE = 'invalid_parameter_value';
    ELSIF p_hash = 'sha256' THEN
        RETURN (('x' || pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(bytes), 'hex'), 16))::bit(64)::bigint
            & 9223372036854775807) % p_count;
    ELSIF p_hash <> 'murmur2' THEN
        RAISE EXCEPTION 'the hash must be "sha256" or "murmur2", not "%"', p_hash USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- This is 32-bit arithmetic in 64 bits: a product of two numbers below 2^32 and 2^31 fits, and is truncated immediately.
    h := 2538058380 # size;
    FOR i IN 0 .. whole - 1 BY 4 LOOP
        k := pg_catalog.get_byte(bytes, i) + (pg_catalog.get_byte(bytes, i + 1)::bigint << 8)
            + (pg_catalog.get_byte(bytes, i + 2)::bigint << 16) + (pg_catalog.get_byte(bytes, i + 3)::bigint << 24);
        k := (k * 1540483477) & 4294967295;
        k := ((k # (k >> 24)) * 1540483477) & 4294967295;
        h := ((h * 1540483477) & 4294967295) # k;
    END LOOP;
    IF size > whole THEN
        FOR i IN whole .. size - 1 LOOP
            h := h # (pg_catalog.get_byte(bytes, i)::bigint << (8 * (i - whole)));
        END LOOP;
        h := (h * 1540483477) & 4294967295;
    END IF;
    h := ((h # (h >> 13)) * 1540483477) & 4294967295;
    RETURN ((h # (h >> 15)) & 2147483647) % p_count;
END $$;

-- Adds a member or renews it. The outcome is "mismatch" if another number of partitions or another hash is stored, or else
-- "joined", with the number of members that are alive, how many of them joined earlier, and which partitions seem to be free.
CREATE FUNCTION @join_partitions_v1@(p_name text, p_count integer, p_hash text, p_member text, p_ttl double precision)
RETURNS TABLE (outcome text, partitions integer, hash text, members integer, rank integer, free integer[])
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    s @partition_set@;
    own bigint;
    at timestamptz;
    fresh boolean;
BEGIN
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);  -- a member that was lost in a crash joins again
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT t.* INTO s FROM @partition_set@ AS t WHERE t.name = p_name FOR SHARE;
    IF NOT FOUND THEN
        INSERT INTO @partition_set@ (name, partitions, hash) VALUES (p_name, p_count, p_hash) ON CONFLICT DO NOTHING;
        SELECT t.* INTO STRICT s FROM @partition_set@ AS t WHERE t.name = p_name FOR SHARE;
    END IF;
    IF s.partitions <> p_count OR s.hash <> p_hash THEN
        RETURN QUERY SELECT 'mismatch', s.partitions, s.hash, NULL::integer, NULL::integer, NULL::integer[];
        RETURN;
    END IF;
    at := pg_catalog.clock_timestamp();
    UPDATE @partition_member@ AS m SET seen_at = at, ttl = p_ttl WHERE m.name = p_name AND m.member = p_member::uuid
    RETURNING m.number INTO own;
    fresh := NOT FOUND;
    IF fresh THEN
        INSERT INTO @partition_member@ AS m (name, member, ttl, seen_at) VALUES (p_name, p_member::uuid, p_ttl, at)
        RETURNING m.number INTO own;
    END IF;
    -- A time more than a TTL ahead proves that the clock was set back; such a member joins again when it renews its row. A time that
    -- is only a little ahead was written after this clock was read.
    DELETE FROM @partition_member@ AS m WHERE m.name = p_name AND m.member IN (
        SELECT o.member FROM @partition_member@ AS o
        WHERE o.name = p_name
        AND NOT o.seen_at BETWEEN at - pg_catalog.make_interval(secs => o.ttl) AND at + pg_catalog.make_interval(secs => o.ttl)
        FOR UPDATE SKIP LOCKED);
    IF fresh OR FOUND THEN
        PERFORM pg_catalog.pg_notify('@channel@', p_name);
    END IF;
    RETURN QUERY SELECT 'joined', s.partitions, s.hash,
        pg_catalog.count(*)::integer, pg_catalog.count(*) FILTER (WHERE m.number < own)::integer,
        ARRAY(
            SELECT i FROM pg_catalog.generate_series(0, s.partitions - 1) AS i
            LEFT JOIN @lease@ AS l ON l.name = p_name || '/' || i
            WHERE l.name IS NULL OR l.free_at <= at ORDER BY i)
    FROM @partition_member@ AS m
    WHERE m.name = p_name
    AND m.seen_at BETWEEN at - pg_catalog.make_interval(secs => m.ttl) AND at + pg_catalog.make_interval(secs => m.ttl);
END $$;

-- Removes a member, so that the others take its partitions as soon as it has released them.
CREATE FUNCTION @leave_partitions_v1@(p_name text, p_member text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    DELETE FROM @partition_member@ AS m WHERE m.name = p_name AND m.member = p_member::uuid;
    IF FOUND THEN
        PERFORM pg_catalog.pg_notify('@channel@', p_name);
    END IF;
    RETURN FOUND;
END $$;

-- As acquire_lease_v2, for one partition. It is not granted if another number of partitions or another hash is stored.
CREATE FUNCTION @acquire_partition_v1@(
    p_name text, p_partition integer, p_count integer, p_hash text, p_lease text, p_ttl double precision,
    p_min_hold double precision, p_lock_delay double precision, p_max_hold double precision, p_owner text, p_host text,
    p_pid integer, p_purpose text, p_metadata text, p_kind text
) RETURNS TABLE (
    granted boolean, token bigint, expires_at timestamptz, remaining double precision, hold_remaining double precision,
    checkpoint text, kind text, owner text, host text, pid integer, backend_pid integer, application_name text,
    purpose text, since timestamptz, set_back double precision
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    PERFORM 1 FROM @partition_set@ AS s
    WHERE s.name = p_name AND s.partitions = p_count AND s.hash = p_hash FOR SHARE;
    IF FOUND THEN
        RETURN QUERY SELECT r.* FROM @acquire_lease_v2@(
            p_name || '/' || p_partition, p_lease, p_ttl, p_min_hold, p_lock_delay, p_max_hold, p_owner, p_host, p_pid, p_purpose,
            p_metadata, p_kind) AS r;
    ELSE
        RETURN QUERY SELECT false, NULL::bigint, NULL::timestamptz, 1::double precision, NULL::double precision, NULL::text, p_kind,
            NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::text, NULL::text, NULL::timestamptz, NULL::double precision;
    END IF;
END $$;

-- Stores another number of partitions, unless one of them is owned. In that case, the row describes it, and nothing is changed.
-- If another hash is stored, resized is NULL, partition is the stored number, kind is the stored hash, and nothing is changed. A
-- key can move to another partition, whose gate does not stop a former owner of the old one, so the tokens of all partitions and
-- their gates are raised.
CREATE FUNCTION @resize_partitions_v1@(p_name text, p_count integer, p_hash text)
RETURNS TABLE (resized boolean, partition integer, kind text, owner text, host text, pid integer, backend_pid integer,
    purpose text, token bigint, since timestamptz, expires_at timestamptz)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    before integer;
    stored text;
    current integer;
    at timestamptz;
    next bigint;
    r @lease@;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT s.partitions, s.hash INTO before, stored FROM @partition_set@ AS s WHERE s.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        INSERT INTO @partition_set@ AS s (name, partitions, hash) VALUES (p_name, p_count, p_hash) ON CONFLICT DO NOTHING;
        SELECT s.partitions, s.hash INTO STRICT before, stored FROM @partition_set@ AS s WHERE s.name = p_name
        FOR NO KEY UPDATE;
    END IF;
    IF stored <> p_hash THEN
        RETURN QUERY SELECT NULL::boolean, before, stored, NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::text,
            NULL::bigint, NULL::timestamptz, NULL::timestamptz;
        RETURN;
    END IF;
    current := @timeline_v1@();
    FOR i IN 0 .. before - 1 LOOP
        -- The row is locked first, because a renewal in progress may extend a lease that looks expired.
        SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name || '/' || i FOR NO KEY UPDATE;
        CONTINUE WHEN NOT FOUND;
        at := pg_catalog.clock_timestamp();
        IF r.free_at > at AND GREATEST(r.acquired_at, r.renewed_at, r.released_at) > at THEN
            PERFORM @rebase_lease_v1@(r.name, at);
            SELECT l.* INTO STRICT r FROM @lease@ AS l WHERE l.name = p_name || '/' || i;
        END IF;
        IF r.free_at > at OR r.lock_key IS NOT NULL AND @session_holds_v1@(r.backend_pid, r.lock_key) THEN
            RETURN QUERY SELECT false, i, r.kind, r.owner, r.host, r.pid, r.backend_pid, r.purpose, r.token, r.acquired_at,
                r.expires_at;
            RETURN;
        END IF;
    END LOOP;
    FOR i IN 0 .. before - 1 LOOP
        SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name || '/' || i;
        CONTINUE WHEN NOT FOUND OR before = p_count;
        next := @next_token_v1@(r.name, r.token, r.timeline, current);
        -- This waits for writers that are inside. From here on, no former owner of this partition can commit.
        INSERT INTO @gate@ AS g (resource, token, updated_at) VALUES (r.name, next, pg_catalog.clock_timestamp())
        ON CONFLICT (resource) DO UPDATE SET token = excluded.token, updated_at = excluded.updated_at;
        UPDATE @lease@ AS l SET token = next, timeline = current, lease_id = NULL WHERE l.name = r.name;
    END LOOP;
    UPDATE @partition_set@ AS s SET partitions = p_count WHERE s.name = p_name;
    PERFORM pg_catalog.pg_notify('@channel@', p_name);
    RETURN QUERY SELECT true, NULL::integer, NULL::text, NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::text,
        NULL::bigint, NULL::timestamptz, NULL::timestamptz;
END $$;
