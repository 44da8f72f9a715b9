package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/settings"
)

const recordHelp = `Record writes what engines ask of the agent as a trace, until it is interrupted, --for is over, or
the agent ends: a line for each prompt, with its time and a number for each of its blocks. kvbench size, kvbench replay
and kvbench bench policy take it. There are no tokens and no hashes in it: the numbers are made with a secret that the
agent forgets, so only equal blocks of one recording can be told.

The traces are in --out as trace-NNNNNN.jsonl, one after another in time, each of at most 64 MiB; of more than
--total-bytes the oldest are removed. A full disk ends the recording, not the agent. A prompt that the agent cannot pass
on in time is dropped, and counted. What an engine finds in its own memory from beginning to end it does not ask for, so
it is not in the trace.`

// recordSettings are the settings of record.
type recordSettings struct {
	cacheSettings
	out    string
	total  int64         // bytes of all files
	within time.Duration // 0: until interrupted
}

// Limits of a recording.
const (
	minRecordBytes = 64 << 10
	maxRecordBytes = 1 << 40
	maxRecordTime  = 30 * 24 * time.Hour
	mostOfAFile    = 64 << 20 // bytes, and at most a quarter of all
)

func recordCommand() *cobra.Command {
	s := &recordSettings{total: 1 << 30}
	cmd := cacheBase(&s.cacheSettings, "record", "Write what engines ask as a trace", recordHelp,
		func(cmd *cobra.Command, _ *cacheSettings) error { return record(cmd, s) })
	cmd.Example = `  kvagent record --out /var/tmp/monday --for 24h
  kvbench size --trace /var/tmp/monday --block-bytes 2MiB`
	cmd.Flags().Lookup("json").Usage = "print what was recorded as JSON at the end"
	cmd.Flags().StringVar(&s.out, "out", "", "new folder for the recording")
	cmd.Flags().Var(settings.Size(&s.total, minRecordBytes, maxRecordBytes), "total-bytes",
		"most bytes of all files; beyond, the oldest are removed")
	cmd.Flags().Var(settings.Duration(&s.within, 0, maxRecordTime), "for", "how long to record; 0: until interrupted")
	return cmd
}

func record(cmd *cobra.Command, s *recordSettings) error {
	if s.out == "" {
		return settings.Invalid(errors.New("out: not given, allowed: a new folder"))
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	signal.Ignore(syscall.SIGXFSZ) // a limit of file sizes is an error like a full disk
	if s.within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.within)
		defer cancel()
	}
	if err := os.Mkdir(s.out, 0o700); err != nil {
		return fmt.Errorf("record: out: %w", err)
	}
	r := &recorder{dir: s.out, total: s.total}
	err := adminclient.New(*s.dir).Lines(ctx, "/record", r.add)
	switch {
	case ctx.Err() != nil && !errors.Is(err, errRecording): // the operator has ended it
		err = nil
	case err == nil:
		err = errors.New("the agent has ended")
	}
	if err = errors.Join(err, r.close()); err != nil {
		err = fmt.Errorf("record: after %d requests: %w", r.Requests, err)
	}
	if s.asJSON {
		return errors.Join(err, json.NewEncoder(cmd.OutOrStdout()).Encode(r))
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%d requests in %d files in %s; not in it: %d that were dropped, %d in files that "+
		"were removed\n", r.Requests-r.Removed, len(r.files), r.dir, r.Dropped, r.Removed)
	return err
}

// recorder writes a recording's files.
type recorder struct {
	Requests uint64 `json:"requests"`
	Dropped  uint64 `json:"dropped"` // requests that the agent could not pass on in time
	Removed  uint64 `json:"removed"` // requests whose files were removed

	dir   string
	total int64
	file  *os.File
	files []recordFile // the oldest first
	made  int
}

type recordFile struct {
	path     string
	bytes    int64
	requests uint64
}

// errRecording is wrapped by errors of the recording's files.
var errRecording = errors.New("the recording cannot be written")

// add writes a line of the agent.
func (r *recorder) add(text []byte) error {
	var line admin.RecordLine
	if err := json.Unmarshal(text, &line); err != nil {
		return fmt.Errorf("a line of the agent: %w", err)
	}
	if r.Dropped += line.Dropped; len(line.HashIDs) == 0 {
		return nil
	}
	if err := r.write(append(text[:len(text):len(text)], '\n')); err != nil {
		return fmt.Errorf("%w: %w", errRecording, err)
	}
	r.Requests++
	return nil
}

// write appends a line to the current file, or to the next one if that is full. A line that could
// not be written whole is cut off again.
func (r *recorder) write(text []byte) error {
	most := min(mostOfAFile, r.total/4)
	if r.file == nil || r.last().bytes+int64(len(text)) > most {
		if err := r.next(); err != nil {
			return err
		}
	}
	last := r.last()
	if _, err := r.file.Write(text); err != nil {
		return errors.Join(err, r.file.Truncate(last.bytes))
	}
	last.bytes += int64(len(text))
	last.requests++
	return r.removeOld()
}

func (r *recorder) last() *recordFile { return &r.files[len(r.files)-1] }

// next opens the next file.
func (r *recorder) next() error {
	if err := r.close(); err != nil {
		return err
	}
	r.made++
	path := filepath.Join(r.dir, fmt.Sprintf("trace-%06d.jsonl", r.made))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	r.file = f
	r.files = append(r.files, recordFile{path: path})
	return nil
}

func (r *recorder) close() error {
	if r.file == nil {
		return nil
	}
	err := r.file.Close()
	r.file = nil
	return err
}

// removeOld removes the oldest files until the rest is within the limit. The current one stays.
func (r *recorder) removeOld() error {
	total := int64(0)
	for _, f := range r.files {
		total += f.bytes
	}
	for total > r.total && len(r.files) > 1 {
		old := r.files[0]
		if err := os.Remove(old.path); err != nil {
			return err
		}
		total -= old.bytes
		r.Removed += old.requests
		r.files = r.files[1:]
	}
	return nil
}
