package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/events"
)

const eventsHelp = `Events prints what routers are told of the agent's blocks: by default what it holds now, as a
new engine is told, and with --follow what is stored and removed from now on. A line is a part of a chain of blocks
of one group: their number, the first and the last hash (of which 16 digits are shown: the integer that vLLM's events
have, in hex; --json has all), and the number of tokens before them. Cleared means that a reset, or the end of the
space, removed all that was told.

The agent keeps tokens only where an engine publishes KV events. Where none does, there is nothing to print, and the
command says how to change that; with --follow it goes on, and prints what is told as soon as one does.

A reader that is slow costs the agent nothing: what came and went before it reads on is one line, missed, with the
number of transitions. A reader that reads nothing for a minute is disconnected. 4 commands may run at once.`

const eventsOff = "no engine of this agent has KV events on (or asked for them yet): start engines with " +
	`--kv-events-config '{"enable_kv_cache_events": true, ...}'`

func eventsCommand() *cobra.Command {
	s := &cacheSettings{}
	follow := false
	cmd := cacheBase(s, "events", "Show what routers are told of a running agent's blocks", eventsHelp,
		func(cmd *cobra.Command, s *cacheSettings) error { return printEvents(cmd, s, follow) })
	cmd.Example = `  kvagent events --model meta-llama/Llama-3.1-8B
  kvagent events --follow --json | jq 'select(.event == "removed") | .blocks'`
	s.addFilter(cmd)
	cmd.Flags().BoolVar(&follow, "follow", false, "print what changes from now on, until interrupted")
	cmd.Flags().Lookup("json").Usage = "print the agent's lines, which are JSON"
	return cmd
}

// errEventsEnded is the end of an agent that is followed.
var errEventsEnded = errors.New("events: the agent has ended")

func printEvents(cmd *cobra.Command, s *cacheSettings, follow bool) error {
	q, out := s.filter(), cmd.OutOrStdout()
	if q.Set("follow", onOff(follow)); !s.asJSON {
		if _, err := fmt.Fprintf(out, eventColumns, "TIME", "SPACE", "MODEL", "GROUP", "MEDIUM", "EVENT", "BLOCKS",
			"FIRST", "LAST", "TOKENS BEFORE"); err != nil {
			return err
		}
	}
	err := adminclient.New(*s.dir).Lines(cmd.Context(), "/events?"+q.Encode(), func(text []byte) error {
		var line admin.EventLine
		if err := json.Unmarshal(text, &line); err != nil {
			return fmt.Errorf("events: %w", err)
		}
		if line.Event == admin.EventOff {
			fmt.Fprintln(cmd.ErrOrStderr(), "kvagent:", eventsOff)
		}
		if s.asJSON {
			_, err := out.Write(append(text, '\n'))
			return err
		}
		return printEvent(out, &line)
	})
	if err == nil && follow {
		err = errEventsEnded
	}
	return err
}

// eventColumns are a line's: wide enough for most, since lines are printed as they come.
const eventColumns = "%-23s  %-8s  %-24s  %-5v  %-7s  %-7s  %6v  %-16s  %-16s  %v\n"

func printEvent(out io.Writer, line *admin.EventLine) error {
	var group, before any = "", ""
	switch {
	case line.Event == admin.EventOff:
		return nil
	case line.Group != nil:
		group = *line.Group
	}
	if line.Event == events.Stored || line.Event == events.Removed {
		before = "not known"
	}
	if line.Before != nil {
		before = *line.Before
	}
	_, err := fmt.Fprintf(out, eventColumns, line.Time.Local().Format("2006-01-02 15:04:05.000"), head(line.Space, 8),
		line.Model, group, line.Medium, line.Event, line.Blocks, tail(line.First, 16), tail(line.Last, 16), before)
	return err
}

// head returns the first n characters of s, tail the last n.
func head(s string, n int) string { return s[:min(n, len(s))] }
func tail(s string, n int) string { return s[max(len(s)-n, 0):] }
