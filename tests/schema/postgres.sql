CREATE INDEX ix_batch_group_group_id ON public.batch_group USING btree (group_id)
CREATE INDEX ix_batch_owned ON public.batch USING btree (owner) WHERE (state = 'leased'::text)
CREATE INDEX ix_batch_run ON public.batch USING btree (run_id, id)
CREATE INDEX ix_event_run_id_kind_at ON public.event USING btree (run_id, kind, at)
CREATE INDEX ix_request_open ON public.request USING btree (worker_id) WHERE (finished_at IS NULL)
CREATE INDEX ix_request_sample_id ON public.request USING btree (sample_id)
CREATE INDEX ix_sample_claim ON public.sample USING btree (run_id, priority, status, group_id, index) WHERE ((owner IS NULL) AND (closed = 0) AND (status = ANY (ARRAY['pending'::text, 'aborted'::text])))
CREATE INDEX ix_sample_group_evaluation ON public.sample_group USING btree (evaluation_id) WHERE (evaluation_id IS NOT NULL)
CREATE INDEX ix_sample_group_prompt_id ON public.sample_group USING btree (prompt_id)
CREATE INDEX ix_sample_group_state ON public.sample_group USING btree (run_id, state, number)
CREATE INDEX ix_sample_group_window ON public.sample_group USING btree (run_id, number) WHERE (state = ANY (ARRAY['open'::text, 'scoring'::text, 'ready'::text]))
CREATE INDEX ix_sample_owned ON public.sample USING btree (owner) WHERE (owner IS NOT NULL)
CREATE INDEX ix_sample_parent ON public.sample USING btree (parent_id) WHERE (parent_id IS NOT NULL)
CREATE INDEX ix_sample_resumed ON public.sample USING btree (run_id) WHERE (n_resumes > 0)
CREATE INDEX ix_sample_run_status ON public.sample USING btree (run_id, status)
CREATE INDEX ix_segment_array_sidecar ON public.segment_array USING btree (sidecar) WHERE (sidecar IS NOT NULL)
CREATE INDEX ix_segment_array_size ON public.segment_array USING btree (name, n_bytes, sample_id)
CREATE INDEX ix_stage_claim ON public.stage USING btree (run_id, id) WHERE ((owner IS NULL) AND (status = 'pending'::text))
CREATE INDEX ix_stage_group_id ON public.stage USING btree (group_id)
CREATE INDEX ix_stage_owned ON public.stage USING btree (owner) WHERE (owner IS NOT NULL)
CREATE INDEX ix_worker_live ON public.worker USING btree (id) WHERE (state = 'live'::text)
CREATE UNIQUE INDEX pk_batch ON public.batch USING btree (id)
CREATE UNIQUE INDEX pk_batch_group ON public.batch_group USING btree (batch_id, group_id)
CREATE UNIQUE INDEX pk_dataset ON public.dataset USING btree (run_id, name)
CREATE UNIQUE INDEX pk_engine ON public.engine USING btree (id)
CREATE UNIQUE INDEX pk_episode_step ON public.episode_step USING btree (sample_id, incarnation, number)
CREATE UNIQUE INDEX pk_evaluation ON public.evaluation USING btree (id)
CREATE UNIQUE INDEX pk_event ON public.event USING btree (id)
CREATE UNIQUE INDEX pk_event_total ON public.event_total USING btree (run_id, worker_id, kind, reason)
CREATE UNIQUE INDEX pk_ledger_total ON public.ledger_total USING btree (run_id, worker_id, fate, reason, version)
CREATE UNIQUE INDEX pk_prompt ON public.prompt USING btree (id)
CREATE UNIQUE INDEX pk_prompt_image ON public.prompt_image USING btree (run_id, digest)
CREATE UNIQUE INDEX pk_request ON public.request USING btree (id)
CREATE UNIQUE INDEX pk_request_total ON public.request_total USING btree (run_id, worker_id, reason)
CREATE UNIQUE INDEX pk_run ON public.run USING btree (id)
CREATE UNIQUE INDEX pk_sample ON public.sample USING btree (id)
CREATE UNIQUE INDEX pk_sample_group ON public.sample_group USING btree (id)
CREATE UNIQUE INDEX pk_segment ON public.segment USING btree (sample_id, incarnation, seq)
CREATE UNIQUE INDEX pk_segment_array ON public.segment_array USING btree (sample_id, incarnation, seq, name)
CREATE UNIQUE INDEX pk_stage ON public.stage USING btree (id)
CREATE UNIQUE INDEX pk_timeline ON public.timeline USING btree (run_id, number)
CREATE UNIQUE INDEX pk_weight_version ON public.weight_version USING btree (run_id, version)
CREATE UNIQUE INDEX pk_worker ON public.worker USING btree (id)
CREATE UNIQUE INDEX uq_batch_group_live ON public.batch_group USING btree (group_id) WHERE (state = ANY (ARRAY['leased'::text, 'committed'::text]))
CREATE UNIQUE INDEX uq_batch_step ON public.batch USING btree (run_id, timeline, step) WHERE (state = ANY (ARRAY['leased'::text, 'committed'::text]))
CREATE UNIQUE INDEX uq_engine_live_url ON public.engine USING btree (url) WHERE (state <> 'gone'::text)
CREATE UNIQUE INDEX uq_evaluation_run_id_dataset_version_settings_key ON public.evaluation USING btree (run_id, dataset, version, settings_key)
CREATE UNIQUE INDEX uq_prompt_dataset_position ON public.prompt USING btree (run_id, dataset, dataset_position)
CREATE UNIQUE INDEX uq_prompt_run_id_content_key ON public.prompt USING btree (run_id, content_key)
CREATE UNIQUE INDEX uq_prompt_run_id_position ON public.prompt USING btree (run_id, "position")
CREATE UNIQUE INDEX uq_request_rid ON public.request USING btree (rid)
CREATE UNIQUE INDEX uq_run_name ON public.run USING btree (name)
CREATE UNIQUE INDEX uq_run_uuid ON public.run USING btree (uuid)
CREATE UNIQUE INDEX uq_sample_group_id_index ON public.sample USING btree (group_id, index)
CREATE UNIQUE INDEX uq_sample_group_import ON public.sample_group USING btree (run_id, import_key) WHERE (import_key IS NOT NULL)
CREATE UNIQUE INDEX uq_sample_group_run_id_number ON public.sample_group USING btree (run_id, number)
CREATE UNIQUE INDEX uq_stage_group ON public.stage USING btree (group_id, incarnation, name) WHERE (sample_id IS NULL)
CREATE UNIQUE INDEX uq_stage_sample_id_incarnation_name ON public.stage USING btree (sample_id, incarnation, name)
CREATE UNIQUE INDEX uq_weight_version_run_id_label ON public.weight_version USING btree (run_id, label)
VIEW abort_causes: engine text
VIEW abort_causes: kind text
VIEW abort_causes: prefilled_again bigint
VIEW abort_causes: reason text
VIEW abort_causes: run text
VIEW abort_causes: run_id bigint
VIEW abort_causes: times bigint
VIEW abort_causes: tokens_kept bigint
VIEW abort_causes: tokens_lost bigint
VIEW abort_causes: version bigint
VIEW abort_causes: worker_id bigint
VIEW batch_steps: batch_id bigint
VIEW batch_steps: created_at double precision
VIEW batch_steps: current_version bigint
VIEW batch_steps: n_groups bigint
VIEW batch_steps: n_samples bigint
VIEW batch_steps: n_tokens bigint
VIEW batch_steps: reward_mean double precision
VIEW batch_steps: run text
VIEW batch_steps: run_id bigint
VIEW batch_steps: settled_at double precision
VIEW batch_steps: staleness_max bigint
VIEW batch_steps: staleness_mean double precision
VIEW batch_steps: state text
VIEW batch_steps: step bigint
VIEW batch_steps: timeline bigint
VIEW batch_steps: truncated_ratio double precision
VIEW ready_groups: dataset text
VIEW ready_groups: epoch bigint
VIEW ready_groups: group_id bigint
VIEW ready_groups: in_window integer
VIEW ready_groups: max_staleness integer
VIEW ready_groups: n_failed bigint
VIEW ready_groups: n_samples bigint
VIEW ready_groups: n_tokens bigint
VIEW ready_groups: number bigint
VIEW ready_groups: oldest_version bigint
VIEW ready_groups: prompt_id bigint
VIEW ready_groups: ready_at double precision
VIEW ready_groups: reward_mean double precision
VIEW ready_groups: reward_std double precision
VIEW ready_groups: run text
VIEW ready_groups: run_id bigint
VIEW ready_groups: staleness double precision
VIEW ready_groups: staleness_mean double precision
VIEW ready_groups: staleness_newest bigint
VIEW ready_groups: staleness_oldest bigint
VIEW ready_groups: waited_s double precision
VIEW token_fate: fate text
VIEW token_fate: reason text
VIEW token_fate: run text
VIEW token_fate: run_id bigint
VIEW token_fate: tokens bigint
VIEW token_fate: version bigint
VIEW version_rewards: mean_tokens double precision
VIEW version_rewards: reward_mean double precision
VIEW version_rewards: reward_std double precision
VIEW version_rewards: run text
VIEW version_rewards: run_id bigint
VIEW version_rewards: samples bigint
VIEW version_rewards: scored bigint
VIEW version_rewards: step bigint
VIEW version_rewards: truncated_ratio double precision
VIEW version_rewards: version bigint
batch ck_batch_state CHECK ((state = ANY (ARRAY['leased'::text, 'committed'::text, 'released'::text, 'rewound'::text])))
batch fk_batch_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
batch pk_batch PRIMARY KEY (id)
batch.attempt bigint NOT NULL
batch.created_at double precision NOT NULL
batch.current_version bigint NOT NULL
batch.id bigint NOT NULL DEFAULT nextval('batch_id_seq'::regclass)
batch.n_groups bigint NOT NULL
batch.n_samples bigint NOT NULL
batch.n_tokens bigint NOT NULL
batch.owner bigint NOT NULL
batch.plan jsonb
batch.policy jsonb NOT NULL
batch.reason text
batch.run_id bigint NOT NULL
batch.settled_at double precision
batch.state text NOT NULL
batch.step bigint NOT NULL
batch.timeline bigint NOT NULL
batch_group ck_batch_group_state CHECK ((state = ANY (ARRAY['leased'::text, 'committed'::text, 'released'::text, 'rewound'::text])))
batch_group fk_batch_group_batch_id_batch FOREIGN KEY (batch_id) REFERENCES batch(id)
batch_group fk_batch_group_group_id_sample_group FOREIGN KEY (group_id) REFERENCES sample_group(id)
batch_group pk_batch_group PRIMARY KEY (batch_id, group_id)
batch_group.batch_id bigint NOT NULL
batch_group.group_id bigint NOT NULL
batch_group.position bigint NOT NULL
batch_group.staleness bigint
batch_group.state text NOT NULL
dataset ck_dataset_purpose CHECK ((purpose = ANY (ARRAY['train'::text, 'eval'::text, 'import'::text])))
dataset fk_dataset_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
dataset pk_dataset PRIMARY KEY (run_id, name)
dataset.chunk_next bigint NOT NULL
dataset.chunk_start bigint NOT NULL
dataset.chunk_stop bigint NOT NULL
dataset.epoch bigint NOT NULL
dataset.n_prompts bigint NOT NULL
dataset.n_served bigint NOT NULL
dataset.name text NOT NULL
dataset.purpose text NOT NULL
dataset.run_id bigint NOT NULL
engine WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
engine ck_engine_state CHECK ((state = ANY (ARRAY['live'::text, 'failed'::text, 'gone'::text])))
engine fk_engine_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
engine pk_engine PRIMARY KEY (id)
engine.attempt bigint NOT NULL
engine.context_length bigint
engine.counter bigint
engine.counter_at double precision
engine.created_at double precision NOT NULL
engine.error text
engine.failures bigint NOT NULL
engine.generated_tokens bigint NOT NULL DEFAULT 0
engine.id bigint NOT NULL DEFAULT nextval('engine_id_seq'::regclass)
engine.label text
engine.not_before double precision NOT NULL
engine.owner bigint
engine.queued bigint
engine.release text
engine.run_id bigint NOT NULL
engine.running bigint
engine.state text NOT NULL
engine.updated_at double precision NOT NULL
engine.url text NOT NULL
engine.version bigint
episode_step ck_episode_step_state CHECK ((state = ANY (ARRAY['started'::text, 'done'::text, 'failed'::text])))
episode_step fk_episode_step_sample_id_sample FOREIGN KEY (sample_id) REFERENCES sample(id)
episode_step pk_episode_step PRIMARY KEY (sample_id, incarnation, number)
episode_step.asked jsonb
episode_step.attempt bigint NOT NULL
episode_step.error text
episode_step.idempotency_key text NOT NULL
episode_step.incarnation bigint NOT NULL
episode_step.kind text NOT NULL DEFAULT 'step'::text
episode_step.name text NOT NULL
episode_step.number bigint NOT NULL
episode_step.result jsonb
episode_step.sample_id bigint NOT NULL
episode_step.settled_at double precision
episode_step.start bigint
episode_step.started_at double precision NOT NULL
episode_step.state text NOT NULL
episode_step.stop bigint
evaluation fk_evaluation_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
evaluation pk_evaluation PRIMARY KEY (id)
evaluation uq_evaluation_run_id_dataset_version_settings_key UNIQUE (run_id, dataset, version, settings_key)
evaluation.created_at double precision NOT NULL
evaluation.dataset text NOT NULL
evaluation.id bigint NOT NULL DEFAULT nextval('evaluation_id_seq'::regclass)
evaluation.max_new_tokens bigint
evaluation.n_groups bigint NOT NULL
evaluation.n_samples bigint NOT NULL
evaluation.run_id bigint NOT NULL
evaluation.sampling jsonb NOT NULL
evaluation.settings_key text NOT NULL
evaluation.version bigint NOT NULL
event fk_event_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
event pk_event PRIMARY KEY (id)
event.at double precision NOT NULL
event.details jsonb
event.group_id bigint
event.id bigint NOT NULL DEFAULT nextval('event_id_seq'::regclass)
event.kind text NOT NULL
event.reason text
event.run_id bigint NOT NULL
event.sample_id bigint
event.step bigint
event.tokens bigint
event.version bigint
event.worker_id bigint
event_total WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
event_total fk_event_total_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
event_total pk_event_total PRIMARY KEY (run_id, worker_id, kind, reason)
event_total.kind text NOT NULL
event_total.n bigint NOT NULL
event_total.reason text NOT NULL
event_total.run_id bigint NOT NULL
event_total.tokens bigint NOT NULL
event_total.worker_id bigint NOT NULL
ledger_total WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
ledger_total ck_ledger_total_fate CHECK ((fate = ANY (ARRAY['in_flight'::text, 'resumable'::text, 'awaiting_stage'::text, 'ready'::text, 'leased'::text, 'consumed'::text, 'dropped'::text, 'stale'::text, 'failed'::text, 'superseded'::text])))
ledger_total fk_ledger_total_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
ledger_total pk_ledger_total PRIMARY KEY (run_id, worker_id, fate, reason, version)
ledger_total.amount bigint NOT NULL
ledger_total.fate text NOT NULL
ledger_total.reason text NOT NULL
ledger_total.run_id bigint NOT NULL
ledger_total.version bigint NOT NULL
ledger_total.worker_id bigint NOT NULL
prompt fk_prompt_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
prompt pk_prompt PRIMARY KEY (id)
prompt uq_prompt_run_id_content_key UNIQUE (run_id, content_key)
prompt uq_prompt_run_id_position UNIQUE (run_id, "position")
prompt.content_key text NOT NULL
prompt.created_at double precision NOT NULL
prompt.dataset text NOT NULL
prompt.dataset_position bigint
prompt.id bigint NOT NULL DEFAULT nextval('prompt_id_seq'::regclass)
prompt.images jsonb
prompt.label jsonb
prompt.metadata jsonb NOT NULL
prompt.n_tokens bigint NOT NULL
prompt.position bigint NOT NULL
prompt.prompt jsonb NOT NULL
prompt.prompt_ids bytea NOT NULL
prompt.run_id bigint NOT NULL
prompt.template_args jsonb
prompt.tools jsonb
prompt_image fk_prompt_image_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
prompt_image pk_prompt_image PRIMARY KEY (run_id, digest)
prompt_image.data bytea NOT NULL
prompt_image.digest text NOT NULL
prompt_image.media_type text NOT NULL
prompt_image.n_bytes bigint NOT NULL
prompt_image.run_id bigint NOT NULL
request WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
request fk_request_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
request fk_request_sample_id_sample FOREIGN KEY (sample_id) REFERENCES sample(id)
request pk_request PRIMARY KEY (id)
request uq_request_rid UNIQUE (rid)
request.attempt bigint NOT NULL
request.cached_tokens bigint
request.e2e_s double precision
request.engine text
request.finish_reason text
request.finished_at double precision
request.generated_tokens bigint
request.greedy bigint
request.id bigint NOT NULL DEFAULT nextval('request_id_seq'::regclass)
request.incarnation bigint NOT NULL
request.lost_reason text
request.lost_tokens bigint
request.prompt_tokens bigint
request.queue_s double precision
request.resumed_tokens bigint NOT NULL
request.retractions bigint
request.rid text NOT NULL
request.run_id bigint NOT NULL
request.sample_id bigint NOT NULL
request.sampling_seed bigint
request.spec jsonb
request.started_at double precision NOT NULL
request.stored_tokens bigint NOT NULL
request.temperature double precision
request.worker_id bigint NOT NULL
request_total WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
request_total fk_request_total_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
request_total pk_request_total PRIMARY KEY (run_id, worker_id, reason)
request_total.at double precision NOT NULL
request_total.cached bigint NOT NULL
request_total.ended bigint NOT NULL
request_total.generated bigint NOT NULL
request_total.lost bigint NOT NULL
request_total.prompt bigint NOT NULL
request_total.reason text NOT NULL
request_total.resumed bigint NOT NULL
request_total.resumes bigint NOT NULL
request_total.run_id bigint NOT NULL
request_total.stored bigint NOT NULL
request_total.unknown bigint NOT NULL
request_total.worker_id bigint NOT NULL
run ck_run_state CHECK ((state = ANY (ARRAY['running'::text, 'paused'::text, 'draining'::text])))
run pk_run PRIMARY KEY (id)
run uq_run_name UNIQUE (name)
run uq_run_uuid UNIQUE (uuid)
run.abort_reason text
run.abort_seq bigint NOT NULL
run.chunk_next bigint NOT NULL
run.chunk_start bigint NOT NULL
run.chunk_stop bigint NOT NULL
run.created_at double precision NOT NULL
run.current_version bigint NOT NULL
run.epoch bigint NOT NULL
run.id bigint NOT NULL DEFAULT nextval('run_id_seq'::regclass)
run.last_version bigint NOT NULL
run.n_groups bigint NOT NULL
run.n_prompts bigint NOT NULL
run.name text NOT NULL
run.retention_step bigint NOT NULL
run.settings jsonb NOT NULL
run.state text NOT NULL
run.step_filled bigint NOT NULL DEFAULT '-1'::integer
run.step_over bigint NOT NULL DEFAULT '-1'::integer
run.timeline bigint NOT NULL
run.uuid text NOT NULL
sample WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
sample ck_sample_owned_is_unfinished CHECK (((owner IS NULL) OR (status = ANY (ARRAY['pending'::text, 'aborted'::text]))))
sample ck_sample_status CHECK ((status = ANY (ARRAY['pending'::text, 'aborted'::text, 'completed'::text, 'truncated'::text, 'failed'::text])))
sample fk_sample_group_id_sample_group FOREIGN KEY (group_id) REFERENCES sample_group(id)
sample fk_sample_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
sample pk_sample PRIMARY KEY (id)
sample uq_sample_group_id_index UNIQUE (group_id, index)
sample.attempt bigint NOT NULL
sample.claimed_at double precision
sample.closed bigint NOT NULL
sample.created_at double precision NOT NULL
sample.error text
sample.failures bigint NOT NULL
sample.finish_reason text
sample.finished_at double precision
sample.finished_by bigint
sample.group_id bigint NOT NULL
sample.id bigint NOT NULL DEFAULT nextval('sample_id_seq'::regclass)
sample.incarnation bigint NOT NULL
sample.index bigint NOT NULL
sample.let_go bigint NOT NULL
sample.logprob_sum double precision NOT NULL
sample.n_aborts bigint NOT NULL
sample.n_loss_tokens bigint NOT NULL
sample.n_resumes bigint NOT NULL
sample.n_segments bigint NOT NULL
sample.n_tokens bigint NOT NULL
sample.n_without_logprob bigint NOT NULL DEFAULT 0
sample.not_before double precision NOT NULL
sample.oldest_version bigint
sample.owner bigint
sample.parent_id bigint
sample.parent_upto bigint
sample.priority bigint NOT NULL
sample.progress_at double precision
sample.removed text
sample.reward double precision
sample.run_id bigint NOT NULL
sample.status text NOT NULL
sample.version_max bigint
sample.version_min bigint
sample.version_unknown bigint NOT NULL
sample_group WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
sample_group ck_sample_group_counters CHECK (((n_open >= 0) AND (n_unscored >= 0)))
sample_group ck_sample_group_state CHECK ((state = ANY (ARRAY['open'::text, 'scoring'::text, 'ready'::text, 'leased'::text, 'consumed'::text, 'dropped'::text, 'stale'::text, 'superseded'::text])))
sample_group fk_sample_group_prompt_id_prompt FOREIGN KEY (prompt_id) REFERENCES prompt(id)
sample_group fk_sample_group_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
sample_group pk_sample_group PRIMARY KEY (id)
sample_group uq_sample_group_run_id_number UNIQUE (run_id, number)
sample_group.created_at double precision NOT NULL
sample_group.epoch bigint NOT NULL
sample_group.evaluation_id bigint
sample_group.id bigint NOT NULL DEFAULT nextval('sample_group_id_seq'::regclass)
sample_group.import_key text
sample_group.n_failed bigint NOT NULL
sample_group.n_open bigint NOT NULL
sample_group.n_samples bigint NOT NULL
sample_group.n_tokens bigint
sample_group.n_unscored bigint NOT NULL
sample_group.number bigint NOT NULL
sample_group.oldest_version bigint
sample_group.prompt_id bigint NOT NULL
sample_group.pruned_at double precision
sample_group.ready_at double precision
sample_group.reason text
sample_group.reward_mean double precision
sample_group.reward_std double precision
sample_group.run_id bigint NOT NULL
sample_group.settled_at double precision
sample_group.state text NOT NULL
sample_group.straggling_at double precision
sample_group.superseded_by bigint
sample_group.timeline bigint NOT NULL
segment ck_segment_kind CHECK ((kind = ANY (ARRAY['generated'::text, 'environment'::text])))
segment ck_segment_n_tokens CHECK ((n_tokens > 0))
segment fk_segment_sample_id_sample FOREIGN KEY (sample_id) REFERENCES sample(id)
segment pk_segment PRIMARY KEY (sample_id, incarnation, seq)
segment.attempt bigint NOT NULL
segment.created_at double precision NOT NULL
segment.engine text
segment.finish_reason text
segment.incarnation bigint NOT NULL
segment.kind text NOT NULL
segment.logprob_sum double precision NOT NULL
segment.loss bigint NOT NULL
segment.n_tokens bigint NOT NULL
segment.owner bigint NOT NULL
segment.payload bytea NOT NULL
segment.request_rid text
segment.sample_id bigint NOT NULL
segment.seq bigint NOT NULL
segment.start bigint NOT NULL
segment.version_max bigint
segment.version_min bigint
segment_array fk_segment_array_sample_id_sample FOREIGN KEY (sample_id) REFERENCES sample(id)
segment_array pk_segment_array PRIMARY KEY (sample_id, incarnation, seq, name)
segment_array.codec text NOT NULL
segment_array.created_at double precision NOT NULL
segment_array.data bytea
segment_array.dtype text NOT NULL
segment_array.incarnation bigint NOT NULL
segment_array.n_bytes bigint
segment_array.name text NOT NULL
segment_array.sample_id bigint NOT NULL
segment_array.seq bigint NOT NULL
segment_array.shape jsonb NOT NULL
segment_array.sidecar text
stage WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
stage ck_stage_status CHECK ((status = ANY (ARRAY['pending'::text, 'done'::text, 'failed'::text])))
stage fk_stage_group_id_sample_group FOREIGN KEY (group_id) REFERENCES sample_group(id)
stage fk_stage_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
stage fk_stage_sample_id_sample FOREIGN KEY (sample_id) REFERENCES sample(id)
stage pk_stage PRIMARY KEY (id)
stage uq_stage_sample_id_incarnation_name UNIQUE (sample_id, incarnation, name)
stage.attempt bigint NOT NULL
stage.claimed_at double precision
stage.created_at double precision NOT NULL
stage.details jsonb
stage.elapsed_s double precision
stage.error text
stage.failures bigint NOT NULL
stage.group_id bigint NOT NULL
stage.id bigint NOT NULL DEFAULT nextval('stage_id_seq'::regclass)
stage.incarnation bigint NOT NULL
stage.let_go bigint NOT NULL
stage.name text NOT NULL
stage.not_before double precision NOT NULL
stage.outcome text
stage.owner bigint
stage.run_id bigint NOT NULL
stage.sample_id bigint
stage.settled_at double precision
stage.status text NOT NULL
stage.value double precision
timeline fk_timeline_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
timeline pk_timeline PRIMARY KEY (run_id, number)
timeline.created_at double precision NOT NULL
timeline.forked_at_step bigint
timeline.number bigint NOT NULL
timeline.parent bigint
timeline.run_id bigint NOT NULL
weight_version fk_weight_version_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
weight_version pk_weight_version PRIMARY KEY (run_id, version)
weight_version uq_weight_version_run_id_label UNIQUE (run_id, label)
weight_version.abandoned_at double precision
weight_version.common_depth bigint NOT NULL
weight_version.created_at double precision NOT NULL
weight_version.depth bigint NOT NULL
weight_version.label text NOT NULL
weight_version.parent bigint
weight_version.path text
weight_version.run_id bigint NOT NULL
weight_version.step bigint
weight_version.timeline bigint NOT NULL
weight_version.version bigint NOT NULL
worker WITH {fillfactor=80,autovacuum_vacuum_scale_factor=0.01,autovacuum_vacuum_threshold=1000}
worker ck_worker_kind CHECK ((kind = ANY (ARRAY['rollout'::text, 'reward'::text, 'trainer'::text, 'tool'::text])))
worker ck_worker_state CHECK ((state = ANY (ARRAY['live'::text, 'dead'::text, 'gone'::text])))
worker fk_worker_run_id_run FOREIGN KEY (run_id) REFERENCES run(id)
worker pk_worker PRIMARY KEY (id)
worker.ended_at double precision
worker.error text
worker.heartbeat double precision NOT NULL
worker.host text NOT NULL
worker.id bigint NOT NULL DEFAULT nextval('worker_id_seq'::regclass)
worker.info jsonb NOT NULL
worker.kind text NOT NULL
worker.name text NOT NULL
worker.pid bigint NOT NULL
worker.run_id bigint NOT NULL
worker.started_at double precision NOT NULL
worker.state text NOT NULL
worker.ttl_s double precision NOT NULL
