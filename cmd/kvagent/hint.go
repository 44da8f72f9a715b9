package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/settings"
)

const hintHelp = `Hint tells the agent how blocks will be used, and prints the receipts: what became of it. Without an
action it prints the last receipts, the newest first, with the blocks that were used in time, and those that were not.

The blocks are those of a client's session (its last prompt), those that a look-up did not find (its name, as in
kvagent explain), or those with hashes. The actions:

  kv.retain    rank them by --priority, 0 to 100, 50 is as without, until --for is over
  kv.pin       do not evict them, until --for is over; within --keep-percent of kvagent serve
  kv.demote    evict them first
  kv.drop      drop them from memory; with --for after that time, unless they are used
  kv.prefetch  bring them from lower tiers into memory
  kv.fetch     copy them from the agent --from`

// hintSettings are the settings of hint.
type hintSettings struct {
	cacheSettings
	request  admin.HintRequest
	id, from string
	priority int
	group    int
	lasts    time.Duration
}

func hintCommand() *cobra.Command {
	s := &hintSettings{priority: 50}
	cmd := cacheBase(&s.cacheSettings, "hint [ACTION]", "Tell how blocks will be used", hintHelp, nil)
	cmd.Args = settings.Args(cobra.MaximumNArgs(1))
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return hint(cmd, s, args) }
	cmd.Example = `  kvagent hint kv.retain --session chat-17 --priority 90 --for 10m
  kvagent hint kv.prefetch --session chat-17
  kvagent hint`
	f := cmd.Flags()
	f.StringVar(&s.request.Session, "session", "", "the client's session")
	f.StringVar(&s.request.Request, "request", "", "name of a look-up")
	f.StringSliceVar(&s.request.Blocks, "block", nil, "hashes in hex, in the order of their chain")
	f.StringVar(&s.request.Space, "space", "", "fingerprint of the space of --block; needed if several are open")
	f.Var(settings.Count(&s.group, 0, 15), "group", "KV cache group of --block")
	f.StringVar(&s.id, "id", "", "name of the action in its receipt")
	f.Var(settings.Count(&s.priority, 0, 100), "priority", "of kv.retain")
	f.Var(settings.Duration(&s.lasts, 0, hints.MaxTime), "for", "how long; 0: 5 minutes, and kv.drop at once")
	f.StringVar(&s.from, "from", "", "of kv.fetch: host:port of the agent that has the blocks")
	return cmd
}

func hint(cmd *cobra.Command, s *hintSettings, args []string) error {
	agent := adminclient.New(*s.dir)
	var body []byte
	var err error
	if len(args) == 0 {
		body, err = agent.Get(cmd.Context(), "/hints")
	} else {
		a := hints.Action{ID: s.id, Priority: uint8(s.priority), Peer: s.from}
		if err := a.Kind.UnmarshalText([]byte(args[0])); err != nil {
			return settings.Invalid(err)
		}
		s.request.Group = uint8(s.group)
		s.request.Actions = []admin.HintAction{{Action: a, Seconds: s.lasts.Seconds()}}
		var text []byte
		if text, err = json.Marshal(&s.request); err == nil {
			body, err = agent.Post(cmd.Context(), "/hints", text)
		}
	}
	if err != nil {
		return fmt.Errorf("hint: %w", err)
	}
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return err
	}
	return printReceipts(cmd.OutOrStdout(), body)
}

func printReceipts(out io.Writer, body []byte) error {
	var answer admin.HintAnswer
	if err := json.Unmarshal(body, &answer); err != nil {
		return errors.New("hint: the agent's answer is no JSON")
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	listReceipts(t, answer.Receipts)
	return t.Flush()
}

func listReceipts(t io.Writer, all []hints.Receipt) {
	fmt.Fprintln(t, "TIME\tACTION\tID\tSESSION\tSTATE\tBLOCKS\tBYTES\tHELPED\tIN VAIN\tREASON")
	for i := range all {
		r := &all[i]
		helped, vain := "-", "-"
		if r.Over {
			helped, vain = fmt.Sprint(r.Helped), fmt.Sprint(r.InVain)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", r.At.Local().Format(time.TimeOnly), r.Kind,
			printable(r.ID), printable(r.Session), r.State, r.Blocks, settings.HumanSize(r.Bytes), helped, vain,
			r.Reason)
	}
}

// printable returns a client's text without what a terminal would obey.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return '?'
	}, text)
}
