package millstream.conformance;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import millstream.conformance.Api.Need;

/** Runs the checks one after the other and prints a line for each; what the broker does not serve is said, not left out. */
public final class Report {
    private static final long CHECK_S_MAX = 90;

    public final Served served;

    private final String only;
    private String suite = "";
    private int ok;
    private int failed;
    private int notServed;

    Report(Served served, String only) {
        this.served = served;
        this.only = only;
    }

    /** What a check does; it throws when something is not as it must be. */
    public interface Body {
        void run() throws Exception;
    }

    /** Give the name that stands before the following checks. */
    void begin(String name) {
        suite = name;
    }

    /** Run one check, unless the broker lacks an API that it needs. */
    public void check(String name, Body body, Need... needs) {
        String title = suite + ": " + name;
        if (!title.contains(only)) {
            return;
        }
        List<String> missing = new ArrayList<>();
        for (Need need : needs) {
            if (!served.has(need)) {
                missing.add(need.toString());
            }
        }
        if (missing.isEmpty()) {
            run(title, body);
        } else {
            notServed(title + " -- needs " + String.join(", ", missing));
        }
    }

    /** Say that something is not there, where there is nothing to check. */
    public void notServed(String what) {
        notServed++;
        line("not served", what);
    }

    private void run(String title, Body body) {
        FutureTask<Void> task = new FutureTask<>(() -> {
            body.run();
            return null;
        });
        long began = System.nanoTime();
        Thread thread = new Thread(task, title);
        thread.setDaemon(true);
        thread.start();
        try {
            task.get(CHECK_S_MAX, TimeUnit.SECONDS);
            ok++;
            line("ok", String.format(Locale.ROOT, "%s  %.1f s", title, (System.nanoTime() - began) / 1e9));
        } catch (ExecutionException error) {
            fail(title, reason(error.getCause()));
        } catch (TimeoutException error) {
            fail(title, "no end after " + CHECK_S_MAX + " s, at " + where(thread.getStackTrace()));
            thread.interrupt();
        } catch (InterruptedException error) {
            fail(title, "interrupted");
        }
    }

    private void fail(String title, String reason) {
        failed++;
        line("FAILED", title + " -- " + reason);
    }

    private static void line(String verdict, String text) {
        System.out.printf("  %-11s %s%n", verdict, text);
        System.out.flush();
    }

    private static String reason(Throwable error) {
        Throwable cause = error;
        while (cause instanceof ExecutionException && cause.getCause() != null) {
            cause = cause.getCause();
        }
        String name = cause instanceof Wrong ? "" : cause.getClass().getSimpleName() + ": ";
        return name + cause.getMessage() + " at " + where(error.getStackTrace());
    }

    private static String where(StackTraceElement[] trace) {
        for (StackTraceElement frame : trace) {
            if (frame.getClassName().startsWith("millstream.") && !frame.getClassName().endsWith(".Wrong")) {
                return frame.getFileName() + ":" + frame.getLineNumber();
            }
        }
        return "an unknown place";
    }

    /** Print the counts, and return whether all checks passed. */
    boolean end() {
        System.out.printf("  %d ok, %d failed, %d not served%n", ok, failed, notServed);
        return failed == 0;
    }
}
