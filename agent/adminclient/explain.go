package adminclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/settings"
)

const explainHelp = `Explain says why prompts were not found, or not all of them. It prints which reasons cost how many
tokens in the last hour, and the last look-ups. --request explains one look-up, block by block, and --block what became
of one block.

A look-up's name is the last 16 hex digits of its last hash. The connector for vLLM logs it with the request's ID at
debug level (VLLM_LOGGING_LEVEL=DEBUG). The agent remembers the last 4,096 look-ups, 65,536 blocks that left memory,
as many that resets dropped, and 16,384 blocks of refused saves. What is older is shown as never stored.`

const defaultRecent = 20

func explainCommand() *cobra.Command {
	var request, block string
	last := defaultRecent
	cmd := askCommand(&cobra.Command{
		Use: "explain", Short: "Say why prompts were not found", Long: explainHelp,
		Example: `  kvagent explain
  kvagent explain --request 6f1c09d2a4b87e35
  kvagent explain --block 11c7a9e05d3f2b6490d1c1f0a8e2b7aa --json`,
	}, func(a *ask, _ []string) error {
		get := func(query string) ([]byte, error) { return a.Get(a.Context(), "/explain?"+query) }
		switch {
		case request != "" && block != "":
			return settings.Invalid(errors.New("request, block: allowed: one of them"))
		case request != "":
			body, err := get("request=" + url.QueryEscape(request))
			return show(a, body, err, printExplanation)
		case block != "":
			body, err := get("block=" + url.QueryEscape(block))
			return show(a, body, err, printBlock)
		}
		body, err := get(fmt.Sprintf("last=%d", last))
		return show(a, body, err, printRecent)
	})
	cmd.Flags().StringVar(&request, "request", "", "explain the latest look-up with this name")
	cmd.Flags().StringVar(&block, "block", "", "say what became of the block with this hash, in hex")
	cmd.Flags().Var(settings.Count(&last, 1, admin.MaxRecent), "last", "list this many look-ups")
	return cmd
}

func printRecent(out io.Writer, recent *admin.Recent) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "tokens not found since %s, by the first block of each look-up that was not:\n",
		recent.Since.Local().Format(time.DateTime))
	fmt.Fprintln(t, "REASON\tTOKENS\tLOOK-UPS")
	for _, one := range recent.Reasons {
		fmt.Fprintf(t, "%s\t%d\t%d\n", one.Reason, one.Tokens, one.Lookups)
	}
	fmt.Fprintln(t, "\nTIME\tREQUEST\tMODEL\tSPACE\tFORM\tSTATUS\tASKED\tTOKENS\tENGINE HAS\tFOUND")
	for i := range recent.Lookups {
		a := &recent.Lookups[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", a.At.Local().Format("2006-01-02 15:04:05.000"),
			a.ID, a.Model, a.Space[:min(8, len(a.Space))], a.Form, a.Status, a.Times, a.Tokens, a.Own, a.Found)
	}
	if len(recent.Hints) > 0 {
		fmt.Fprintln(t)
		listReceipts(t, recent.Hints)
	}
	fmt.Fprintf(t, "\nwhat is remembered takes %s of memory\n", settings.HumanSize(recent.Bytes))
	return t.Flush()
}

func printBlock(out io.Writer, all *[]history.Explanation) error {
	if len(*all) == 0 {
		fmt.Fprintln(out, "never stored in any space, as far as the agent remembers")
	}
	for i := range *all {
		e := &(*all)[i]
		fmt.Fprintf(out, "space %s  model %s\n", e.Space, e.Model)
		for j := range e.Blocks {
			fmt.Fprintf(out, "  group %d: %s\n", e.Blocks[j].Group, e.Blocks[j].Story())
		}
	}
	return nil
}

func printExplanation(out io.Writer, e *history.Explanation) error {
	a := e.Asked
	fmt.Fprintf(out, "space   %s  model %s\n", e.Space, e.Model)
	fmt.Fprintf(out, "look-up %s  %s  status %s  found %d of %d tokens, the engine had %d\n", a.ID,
		a.At.Local().Format("2006-01-02 15:04:05.000"), a.Status, a.Found, a.Tokens, a.Own)
	fmt.Fprintf(out, "reason  %s: %s\n\n", e.Reason, e.Text)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "GROUP\tBLOCKS\tFIRST\tFATE")
	for i := range e.Blocks {
		f := &e.Blocks[i]
		blocks := fmt.Sprint(f.From)
		if f.To > f.From {
			blocks = fmt.Sprintf("%d-%d", f.From, f.To)
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\n", f.Group, blocks, f.First, f.Story())
	}
	return t.Flush()
}

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

func hintCommand() *cobra.Command {
	var request admin.HintRequest
	action := hints.Action{}
	priority, group := 50, 0
	var lasts time.Duration
	cmd := askCommand(&cobra.Command{
		Use: "hint [ACTION]", Short: "Tell how blocks will be used", Long: hintHelp, Args: cobra.MaximumNArgs(1),
		Example: `  kvagent hint kv.retain --session chat-17 --priority 90 --for 10m
  kvagent hint kv.prefetch --session chat-17
  kvagent hint`,
	}, func(a *ask, args []string) error {
		if len(args) == 0 {
			body, err := a.Get(a.Context(), "/hints")
			return show(a, body, err, printReceipts)
		}
		if err := action.Kind.UnmarshalText([]byte(args[0])); err != nil {
			return settings.Invalid(err)
		}
		action.Priority, request.Group = uint8(priority), uint8(group)
		request.Actions = []admin.HintAction{{Action: action, Seconds: lasts.Seconds()}}
		text, err := json.Marshal(&request)
		if err != nil {
			return err
		}
		body, err := a.Post(a.Context(), "/hints", text)
		return show(a, body, err, printReceipts)
	})
	f := cmd.Flags()
	f.StringVar(&request.Session, "session", "", "the client's session")
	f.StringVar(&request.Request, "request", "", "name of a look-up")
	f.StringSliceVar(&request.Blocks, "block", nil, "hashes in hex, in the order of their chain")
	f.StringVar(&request.Space, "space", "", "fingerprint of the space of --block; needed if several are open")
	f.Var(settings.Count(&group, 0, 15), "group", "KV cache group of --block")
	f.StringVar(&action.ID, "id", "", "name of the action in its receipt")
	f.Var(settings.Count(&priority, 0, 100), "priority", "of kv.retain")
	f.Var(settings.Duration(&lasts, 0, hints.MaxTime), "for", "how long; 0: 5 minutes, and kv.drop at once")
	f.StringVar(&action.Peer, "from", "", "of kv.fetch: host:port of the agent that has the blocks")
	return cmd
}

func printReceipts(out io.Writer, answer *admin.HintAnswer) error {
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
