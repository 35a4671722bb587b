-- Leases, since version 5: the leader of an election can be asked to resign.

-- As in version 3, but for a leader that was asked to resign, the element has a fourth value. Only leaders of elections can be
-- asked, and only releases that know this value have elections. The name of the function is unchanged, because heartbeats
-- continue across an upgrade or downgrade of the tables.
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
            IF r.kind = 'term' THEN
                -- This is a separate statement, so that a role without elections needs no privilege to read the requests.
                IF EXISTS (SELECT FROM @resign_request@ AS q WHERE q.name = r.name AND q.token >= p_tokens[i]) THEN
                    answer := answer || '"asked"'::jsonb;
                END IF;
            END IF;
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

-- Asks the leader of an election to resign, and adds a row to the audit table. Returns the token of the leader's term, no row if
-- there is no leader, or NULL if the name is held by something other than a leader.
CREATE FUNCTION @ask_to_resign_v1@(p_name text, p_actor text, p_reason text, p_detail text) RETURNS TABLE (token bigint)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @lease@;
    at timestamptz;
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT l.* INTO r FROM @lease@ AS l WHERE l.name = p_name FOR NO KEY UPDATE;
    at := pg_catalog.clock_timestamp();
    IF r.released_at IS NOT NULL OR r.expires_at <= at OR r.name IS NULL THEN
        RETURN;
    ELSIF r.kind IS DISTINCT FROM 'term' THEN
        RETURN QUERY SELECT NULL::bigint;
        RETURN;
    END IF;
    INSERT INTO @resign_request@ (name, token, asked_at) VALUES (p_name, r.token, at)
    ON CONFLICT (name) DO UPDATE SET token = excluded.token, asked_at = excluded.asked_at;
    INSERT INTO @audit@ (action, resource, actor, reason, at, detail)
    VALUES ('ask to resign', p_name, p_actor, p_reason, at, p_detail::jsonb);
    -- The leader's heartbeat listens on this channel for evictions. It renews the lease at once, and so reads the request.
    PERFORM pg_catalog.pg_notify('@prefix@evicted', p_name);
    RETURN QUERY SELECT r.token;
END $$;
